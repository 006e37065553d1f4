/* Captures of CUDA graphs, and calls that a test makes fail.
 *
 * While a thread captures in the global mode, calls that a captured graph cannot contain are refused on every thread whose own
 * mode is not relaxed, and such a call makes the capture invalid. Part of stand_in.c. */

enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURED_EVENT = 907 };
enum { CAPTURE_GLOBAL, CAPTURE_RELAXED = 2, CAPTURED_STREAMS = 4096 };
/* Work of a capturing stream becomes part of the graph, which this stand-in does not keep. */
enum { NOT_CAPTURING, CAPTURING, INVALIDATED };

static int captures;
static int captured[CAPTURED_STREAMS];
static __thread int capture_mode;

/* What each call of a kind fails with, if not 0, and how many calls have failed so. */
int query_code, synchronize_code, unregister_code, failures;

static int *capture_of(void *stream) {
    static int none;
    return (unsigned long)stream < CAPTURED_STREAMS ? &captured[(unsigned long)stream] : &none;
}

static int is_capturing(void *stream) { return __atomic_load_n(capture_of(stream), __ATOMIC_SEQ_CST) != NOT_CAPTURING; }

static int invalidated(void) {
    for (int k = 0; k < CAPTURED_STREAMS; k++) {
        int from = CAPTURING;
        __atomic_compare_exchange_n(&captured[k], &from, INVALIDATED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    return CAPTURE_UNSUPPORTED;
}

static int failure(int *code) {
    if (capture_mode != CAPTURE_RELAXED && __atomic_load_n(&captures, __ATOMIC_SEQ_CST)) return invalidated();
    int failed = code ? __atomic_load_n(code, __ATOMIC_SEQ_CST) : 0;
    if (failed) __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);
    return failed;
}

/* For calls that no graph can contain: refused during a capture, and failing with this code. */
#define NOT_IN_A_CAPTURE(code)              \
    do {                                    \
        int failed_with = failure(code);    \
        if (failed_with) return failed_with; \
    } while (0)

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return DONE;
}

int cuStreamIsCapturing(void *stream, int *status) {
    *status = __atomic_load_n(capture_of(stream), __ATOMIC_SEQ_CST);
    return DONE;
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (!stream || mode != CAPTURE_GLOBAL || is_capturing(stream)) return INVALID_VALUE;
    __atomic_store_n(capture_of(stream), CAPTURING, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&captures, 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuStreamEndCapture(void *stream, void **graph) {
    *graph = NULL;
    int was = __atomic_exchange_n(capture_of(stream), NOT_CAPTURING, __ATOMIC_SEQ_CST);
    if (was == NOT_CAPTURING) return INVALID_VALUE;
    __atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);
    return was == INVALIDATED ? CAPTURE_INVALIDATED : DONE;
}

int cuGraphDestroy(void *graph) { return graph ? INVALID_VALUE : DONE; }
