/* Net plugins with one thing wrong each, chosen by -DCASE_NAME. Without a case: version 7, one device, nothing wrong. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef void (*slot)(void);
#define F(function) ((slot)(function))

static logger logs;
int inits;

#ifdef CASE_UNRESOLVED
extern int this_symbol_is_nowhere(void);
#endif

#ifdef CASE_LOGS
/* Every level, formats that are easily got wrong, lines without end and without file. */
static void *from_a_thread(void *unused) {
    logs(2, 0x10, "/a/thread.c", 900, "from a thread of the plugin's own");
    return unused;
}

static void log_everything(void) {
    char longest[3000];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    for (int level = 0; level <= 6; level++) logs(level, 0x10, "/a/levels.c", 100 + level, "level %d", level);
    logs(3, 0x10, "/a/formats.c", 200, "100%% of %s, %5.2f, %zu, %lld, %c, %x, %-4d|", "it", 2.5, (size_t)1 << 40,
         -5000000000LL, 'c', 255, 7);
    logs(3, 0x10, "/a/formats.c", 201, "%s", "text with %s %n %d");
    logs(3, 0x10, "/a/formats.c", 202, "%s", longest);
    logs(3, 0x10, "/a/formats.c", 203, "two\nlines\n");
    logs(3, 0x10, "/a/formats.c", 204, "%s", "");
    logs(3, 0x10, NULL, 205, "no file");
    logs(3, 0x10, "/a/formats.c", 206, NULL);
    for (int n = 0; n < 1000; n++) logs(2, 0x10, "/a/flood.c", 300, "flood %d", n);
    for (int n = 0; n < 40; n++) logs(4, 0x10, "/a/abort.c", 400, "abort %d", n);
    pthread_t thread;
    pthread_create(&thread, NULL, from_a_thread, NULL);
    pthread_join(thread, NULL);
}
#endif

#ifdef CASE_THREAD_EXITS
static void *gives_up(void *unused) {
    logs(2, 0x10, "/a/thread.c", 901, "too many fragments in one chunk");
    exit(1);
    return unused;
}
#endif

#ifdef CASE_ENDS_BADLY
__attribute__((destructor)) static void at_the_end(void) { abort(); }
#endif

static int p_init(logger log) {
    logs = log;
    inits++;
#if defined(CASE_INIT_WARNS_AND_FAILS)
    log(3, 0x10, "/a/init.c", 8, "NET/X : unix client prefix /run/tcpx");
    log(2, 0x10, "/a/init.c", 9, "NET/X : no interface found");
    log(3, 0x10, "/a/init.c", 10, "TCPXCHECK /a/init.c:11 -> 3");
    return 3;
#elif defined(CASE_INIT_FAILS)
    log(2, 0x10, "/a/init.c", 10, "no %s here: %d%%", "NIC", 0);
    return 3;
#elif defined(CASE_INIT_EXITS)
    log(2, 0x10, "/a/init.c", 11, "the manager is not running, giving up");
    exit(1);
#elif defined(CASE_INIT_CRASHES)
    log(3, 0x10, "/a/init.c", 12, "about to crash");
    *(volatile int *)8 = 1;
#elif defined(CASE_INIT_HANGS)
    log(3, 0x10, "/a/init.c", 13, "waiting for ever in process %d", (int)getpid());
    for (;;) pause();
#elif defined(CASE_LOGS)
    log_everything();
#elif defined(CASE_PRINTS)
    printf("{\"step\":\"printed\"}\n");
    fflush(stdout);
    fprintf(stderr, "to standard error\n");
#elif defined(CASE_PRINTS_AND_EXITS)
    fprintf(stderr, "assertion failed: the sky is up\n");
    abort();
#elif defined(CASE_UNRESOLVED)
    return this_symbol_is_nowhere();
#endif
    return 0;
}

static int p_devices(int *count) {
#if defined(CASE_NO_DEVICES)
    *count = 0;
#elif defined(CASE_NEGATIVE_DEVICES)
    *count = -1;
#elif defined(CASE_MANY_DEVICES)
    *count = 2000000000;
#elif defined(CASE_DEVICES_FAIL)
    (void)count;
    return 2;
#else
    *count = 1;
#endif
    return 0;
}

/* As version 6 writes them: name, path, guid, pointer types, speed, port, latency, comms, receives. */
struct properties {
    const char *name;
    const char *pci_path;
    uint64_t guid;
    int ptr_support, speed, port;
    float latency;
    int max_comms, max_recvs;
#ifndef CASE_V6_THROUGH_V4
    int device_type, device_version;
#endif
};

static int p_properties(int device, struct properties *p) {
    (void)device;
#ifdef CASE_NULL_NIC
    p->name = NULL;
#else
    p->name = "nic\n0";
#endif
    p->pci_path = NULL;
    p->guid = 9;
    p->ptr_support = 1;
    p->speed = 10000;
    p->port = 1;
    p->latency = 0;
    p->max_comms = 65536;
    p->max_recvs = 1;
#ifdef CASE_STRANGE_DEVICE
    p->device_type = 3;
#endif
#ifdef CASE_PROPERTIES_EXIT
    logs(2, 0x10, "/a/properties.c", 14, "device %d is gone", device);
    _exit(9);
#endif
    return 0;
}

static int p_listen(int device, void *handle, void **comm) {
    (void)device;
    (void)handle;
#if defined(CASE_LISTEN_EXITS)
    logs(2, 0x10, "/a/listen.c", 20, "the first line");
    for (int n = 0; n < 3; n++) logs(2, 0x10, "/a/listen.c", 21, "no page is left: %d", n);
    exit(1);
#elif defined(CASE_THREAD_EXITS)
    pthread_t thread;
    pthread_create(&thread, NULL, gives_up, NULL);
    for (;;) pause();
#elif defined(CASE_LISTEN_GIVES_NOTHING)
    *comm = NULL;
#else
    *comm = (void *)0x1000;
#endif
    return 0;
}

static int p_connect(int device, void *handle, void **comm, void **device_handle) {
    (void)device;
    (void)handle;
    (void)comm;
    (void)device_handle;
    return 3;
}

/* The thread that hangs in it is told apart by this. */
volatile int may_return;
static int p_accept(void *listener, void **comm, void **device_handle) {
    (void)listener;
    (void)comm;
    (void)device_handle;
#ifdef CASE_ACCEPT_BLOCKS
    while (!may_return) usleep(1000);
#endif
    return 0;
}

static int p_other(void) { return 0; }

#ifndef NAME
#define NAME "Broken plugin"
#endif

/* Slot 8 is new in version 6, and 17 and 18 in version 7. */
struct {
    const char *name;
    slot slots[20];
}
#if defined(CASE_NO_TABLE)
ncclCollNetPlugin_v7
#elif defined(CASE_TOO_OLD)
ncclNetPlugin_v3
#elif defined(CASE_V6_THROUGH_V4)
ncclNetPlugin_v4
#else
ncclNetPlugin_v7
#endif
    = {
#ifdef CASE_NULL_NAME
        NULL,
#else
        NAME,
#endif
        {F(p_init), F(p_devices), F(p_properties), F(p_listen), F(p_connect), F(p_accept), F(p_other), F(p_other),
         F(p_other),
#ifdef CASE_NO_IRECV
         F(p_other), NULL, F(p_other), F(p_other),
#else
         F(p_other), F(p_other), F(p_other), F(p_other),
#endif
         F(p_other), F(p_other), F(p_other), NULL, NULL, NULL, NULL}};

#ifdef CASE_TWO_VERSIONS
struct {
    const char *name;
    slot slots[20];
} ncclNetPlugin_v5 = {NAME " of v5",
                      {F(p_init), F(p_devices), F(p_properties), F(p_listen), F(p_connect), F(p_accept), F(p_other),
                       F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other)}};
#endif
