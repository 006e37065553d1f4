/* The logger that plugins call. It is C-variadic, which stable Rust can call but not define, so these lines
 * format the text and hand it on. Read next: mod.rs. */

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>

/* Longer lines are cut. The same number as limits::PLUGIN_LOG_LINE_BYTES_MAX, and one for the 0. */
#define LINE_BYTES (1024 + 1)

typedef void (*line_sink)(int level, const char *file, int line, const char *text, size_t text_bytes);

static _Atomic(line_sink) sink;

void ferrywire_nccl_log_into(line_sink to) { atomic_store(&sink, to); }

void ferrywire_nccl_log(int level, unsigned long subsystems, const char *file, int line, const char *format, ...) {
    line_sink to = atomic_load(&sink);
    if (!to || !format) return;
    (void)subsystems;
    /* Callers log first and look at errno afterwards. */
    int saved = errno;
    char text[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int wanted = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (wanted < 0)
        wanted = snprintf(text, sizeof text, "(a line that cannot be formatted)");
    to(level, file, line, text, (size_t)wanted < sizeof text ? (size_t)wanted : sizeof text - 1);
    errno = saved;
}
