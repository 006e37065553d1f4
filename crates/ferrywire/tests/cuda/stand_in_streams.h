/* Streams and events of the stand-in: work that is done late, by a thread of its own, in the order of each stream and
 * in no order among them. Code that uses memory before its copy is done finds wrong bytes.
 *
 * Part of stand_in.c, whose `lock` guards all of this. Streams and events are numbers in disguise, and
 * belong to the device that was current when they were made. What a driver refuses of another device's, and what not, was seen
 * with driver 580 on two H200: launches, fills and records, but no copies, flags, waits and queries. */

enum { COPY, FILL, FLAG, KERNEL, AWAIT, HOLD, STREAMS = 2048, EVENTS = 2048, PARAMETERS = 2048, KERNELS_MAX = 64 };
/* The place of an event that was recorded in a capturing stream. */
enum { IN_A_GRAPH = -2 };

/* A GPU has few queues for its multiprocessors, and so many streams that wait for a word of memory stand in all of them; in the
 * only one, if a variable asks for that. They are for kernels, for what is filled, for copies within a GPU, and, as an H200's
 * driver has it, for copies to it of at most so many bytes in one row, from memory that is pinned or from other. */
enum { QUEUED_STREAMS = 32, SHORT_BYTES = 24 << 10, NOT_PINNED_BYTES = 64 << 10 };

struct work {
    int what;
    char *to, *from;
    size_t bytes;
    address value;
    int other, kernel, blocks, begun, queued, by_engine;
    struct timespec until;
    char *parameters;
    void *launch;
    struct work *next;
};

struct rectangle {
    size_t source_x, source_y;
    int source_kind;
    void *source;
    address source_device;
    void *source_array;
    size_t source_pitch, target_x, target_y;
    int target_kind;
    void *target_host;
    address target;
    void *target_array;
    size_t target_pitch, width, rows;
};

/* A stream counts the work that was enqueued and the work that is done: an event is a stream and a count. */
static struct stream {
    int open, device;
    struct work *first, **end;
    address given, done;
} all_streams[STREAMS];
static struct event {
    int open, device, stream;
    address at;
} all_events[EVENTS];
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, less = PTHREAD_COND_INITIALIZER;
static int worker_runs;
/* Kernels that are under way. */
static int kernels_run;
/* Other work occupies all multiprocessors. */
static int kernels_held;
/* The copy engines are stalled, for copies that no thread waits for. */
static int copies_held;

#ifdef KERNELS
int stand_in_kernel(const char *name);
/* Copies the parameters, and says whether the kernel can be launched so. */
int stand_in_take(int kernel, unsigned block, void **parameters, char *into, address *delay_ns);
void *stand_in_launch(int kernel, unsigned blocks, char *parameters);
int stand_in_has_ended(void *launch);
/* When it has ended. */
void stand_in_forget(void *launch);
#else
static void *stand_in_launch(int kernel, unsigned blocks, char *parameters) { return NULL; }
static int stand_in_has_ended(void *launch) { return 1; }
static void stand_in_forget(void *launch) {}
#endif

static struct stream *stream_of(void *handle) {
    long number = (long)handle - 1;
    return number >= 0 && number < STREAMS && all_streams[number].open ? &all_streams[number] : NULL;
}

static struct event *event_of(void *handle) {
    long number = (long)handle - 1;
    return number >= 0 && number < EVENTS && all_events[number].open ? &all_events[number] : NULL;
}

/* Device memory is there for kernels only. */
static void show(int how) {
    for (int k = 0; k < ranges_used; k++)
        if (ranges[k].kind == DEVICE || (ranges[k].kind == GOING && (char *)ranges[k].base != ranges[k].view))
            mprotect((void *)ranges[k].base, ranges[k].bytes, how);
}

static int all_queues_are_held(void) {
    const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int held = 0, enough = queues && atoi(queues) == 1 ? 1 : QUEUED_STREAMS;
    for (int k = 0; k < STREAMS; k++) {
        struct work *first = all_streams[k].first;
        held += first && first->what == HOLD && __atomic_load_n((address *)first->to, __ATOMIC_ACQUIRE) < first->value;
    }
    return held >= enough;
}

/* True the first time, and until so long after that. */
static int is_before(struct work *work, address ns) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!work->begun) {
        work->begun = 1;
        work->until.tv_sec = now.tv_sec + (now.tv_nsec + ns) / 1000000000;
        work->until.tv_nsec = (now.tv_nsec + ns) % 1000000000;
    }
    return now.tv_sec < work->until.tv_sec || (now.tv_sec == work->until.tv_sec && now.tv_nsec < work->until.tv_nsec);
}

static int is_ready(struct work *work) {
    if (work->launch) return stand_in_has_ended(work->launch);
    if ((work->queued || work->what == FILL || work->what == KERNEL) && all_queues_are_held()) return 0;
    if (work->what == KERNEL && kernels_held) return 0;
    if (work->by_engine && copies_held) return 0;
    if (work->what == HOLD) return __atomic_load_n((address *)work->to, __ATOMIC_ACQUIRE) >= work->value;
    if (work->what != AWAIT) return 1;
    if (work->other >= 0) return all_streams[work->other].done >= work->value;
    return !is_before(work, work->value);
}

/* Whether it is done. */
static int perform(struct work *work) {
    switch (work->what) {
    case COPY: memmove(work->to, work->from, work->bytes); break;
    case FILL: memset(work->to, (int)work->value, work->bytes); break;
    case FLAG:
        if (work->bytes == 8) __atomic_store_n((address *)work->to, work->value, __ATOMIC_RELEASE);
        else __atomic_store_n((unsigned *)work->to, (unsigned)work->value, __ATOMIC_RELEASE);
        break;
    case KERNEL:
        if (work->launch) {
            stand_in_forget(work->launch);
            if (--kernels_run == 0) show(PROT_NONE);
            break;
        }
        if (kernels_run++ == 0) show(PROT_READ | PROT_WRITE);
        work->launch = stand_in_launch(work->kernel, work->blocks, work->parameters);
        return 0;
    }
    return 1;
}

static void *work_on(void *unused) {
    unsigned random = 1, from = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct stream *next = NULL;
        int waiting = 0;
        for (int k = 0; k < STREAMS && !next; k++) {
            struct stream *each = &all_streams[(from + k) % STREAMS];
            waiting |= each->first != NULL;
            if (each->first && is_ready(each->first)) next = each;
        }
        random = random * 1664525 + 1013904223;
        from = random >> 8;
        if (!next && !waiting) {
            pthread_cond_wait(&more, &lock);
        } else if (!next || random >> 29 == 0) {
            /* Late, and not in the order in which it came. */
            pthread_mutex_unlock(&lock);
            usleep(random >> 24 & 63);
            pthread_mutex_lock(&lock);
        } else {
            struct work *work = next->first;
            if (!perform(work)) continue;
            next->first = work->next;
            if (!next->first) next->end = &next->first;
            next->done++;
            free(work->parameters);
            free(work);
            pthread_cond_broadcast(&less);
        }
    }
    return unused;
}

/* With the lock held. */
static int give(struct stream *stream, struct work work) {
    if (is_capturing((void *)(stream - all_streams + 1))) return DONE;
    struct work *copy = malloc(sizeof *copy);
    *copy = work;
    copy->next = NULL;
    *stream->end = copy;
    stream->end = &copy->next;
    stream->given++;
    if (!worker_runs) {
        pthread_t worker;
        worker_runs = !pthread_create(&worker, NULL, work_on, NULL) && !pthread_detach(worker);
    }
    pthread_cond_signal(&more);
    return worker_runs ? DONE : OUT_OF_MEMORY;
}

/* With the lock held, which others get meanwhile. */
static void finish(struct stream *stream) {
    address given = stream->given;
    while (stream->done < given) pthread_cond_wait(&less, &lock);
}

/* Calls that wait for all work of a device. */
int frees_waiting;

/* Waits for all work that a device was given so far, as freeing or unpinning its memory does. Work of other devices goes on. */
static void finish_all(int device) {
    __atomic_add_fetch(&frees_waiting, 1, __ATOMIC_SEQ_CST);
    for (int k = 0; k < STREAMS; k++)
        if (all_streams[k].device == device) finish(&all_streams[k]);
    __atomic_sub_fetch(&frees_waiting, 1, __ATOMIC_SEQ_CST);
}

/* Unknown addresses are the host's, and the work is done when this returns. */
static int move_rows(void *handle, address target, address source, size_t bytes, size_t rows) {
    NEEDS_CONTEXT;
    if (!bytes) return DONE;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    char *to = view(target, bytes), *from = view(source, bytes);
    int given = !to || !from || (handle && !stream) ? INVALID_VALUE : DONE;
    int at_once = !stream || !find(target) || !find(source);
    if (given == DONE && stream) {
        struct range *device = find(target), *other = find(source);
        int queued = device && device->kind == DEVICE &&
                     ((other && other->kind == DEVICE) || (rows == 1 && bytes <= (other ? SHORT_BYTES : NOT_PINNED_BYTES)));
        given = give(stream, (struct work){
                                 .what = COPY, .to = to, .from = from, .bytes = bytes, .queued = queued, .by_engine = !at_once});
        if (at_once) finish(stream);
    } else if (given == DONE) {
        memmove(to, from, bytes);
    }
    pthread_mutex_unlock(&lock);
    return given;
}

void stand_in_hold_copies(int held) {
    pthread_mutex_lock(&lock);
    copies_held = held;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
}

static int move(void *handle, address target, address source, size_t bytes) {
    return move_rows(handle, target, source, bytes, 1);
}

static int fill_or_flag(void *handle, int what, address target, address value, size_t bytes) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    struct range *range = find(target);
    char *to = range ? view(target, bytes) : NULL;
    struct work work = {.what = what, .to = to, .value = value, .bytes = bytes};
    int elsewhere = what == FILL && stream && range && range->kind == DEVICE && range->device != stream->device;
    int given = to && stream && !elsewhere ? give(stream, work) : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return given;
}

int cuMemcpyAsync(address target, address source, size_t bytes, void *stream) { return move(stream, target, source, bytes); }

static int is_device(address at) {
    pthread_mutex_lock(&lock);
    struct range *found = find(at);
    int device = found && found->kind == DEVICE;
    pthread_mutex_unlock(&lock);
    return device;
}

/* An address of a GPU is looked up, and nothing else is it. */
int cuMemcpyHtoDAsync_v2(address target, void *source, size_t bytes, void *stream) {
    return stream && is_device(target) ? move(stream, target, (address)source, bytes) : INVALID_VALUE;
}

/* Of rows without gaps, from the host to a GPU. */
int cuMemcpy2DAsync_v2(struct rectangle *of, void *stream) {
    if (of->source_x || of->source_y || of->target_x || of->target_y || !of->width || !of->rows) return INVALID_VALUE;
    if (of->source_kind != 1 || of->target_kind != 2 || of->source_pitch != of->width || of->target_pitch != of->width)
        return INVALID_VALUE;
    if (!stream || !is_device(of->target)) return INVALID_VALUE;
    return move_rows(stream, of->target, (address)of->source, of->width * of->rows, of->rows);
}

int cuMemcpyDtoHAsync_v2(void *target, address source, size_t bytes, void *stream) {
    return stream && is_device(source) ? move(stream, (address)target, source, bytes) : INVALID_VALUE;
}

int cuMemcpyHtoD_v2(address target, void *source, size_t bytes) { return move(NULL, target, (address)source, bytes); }

int cuMemcpyDtoH_v2(void *target, address source, size_t bytes) { return move(NULL, (address)target, source, bytes); }

#ifdef BATCHES
int cuMemcpyBatchAsync(address *targets, address *sources, size_t *sizes, size_t count, unsigned *attributes, size_t *first,
                       size_t sets, size_t *failed, void *stream) {
    NEEDS_CONTEXT;
    if (sets != 1 || *first != 0 || attributes[0] != 1 || attributes[5] != 0 || !stream) return INVALID_VALUE;
    for (size_t k = 0; k < count; k++) {
        int done = sizes[k] ? move(stream, targets[k], sources[k], sizes[k]) : INVALID_VALUE;
        *failed = k;
        if (done != DONE) return done;
    }
    return DONE;
}
#endif

int cuMemsetD8Async(address target, unsigned char byte, size_t bytes, void *stream) {
    return fill_or_flag(stream, FILL, target, byte, bytes);
}

int cuStreamWriteValue32_v2(void *stream, address at, unsigned value, unsigned flags) {
    return at % 4 || flags ? INVALID_VALUE : fill_or_flag(stream, FLAG, at, value, 4);
}

int cuStreamWriteValue64_v2(void *stream, address at, address value, unsigned flags) {
    return at % 8 || flags ? INVALID_VALUE : fill_or_flag(stream, FLAG, at, value, 8);
}

/* The default stream waits for nothing: nothing is ever given to it. */
int cuStreamWaitValue64_v2(void *stream, address at, address value, unsigned flags) {
    return at % 8 || flags ? INVALID_VALUE : fill_or_flag(stream, HOLD, at, value, 8);
}

int cuStreamCreate(void **stream, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    long found = -1;
    for (int k = 0; k < STREAMS && found < 0; k++)
        if (!all_streams[k].open && (!all_streams[k].first || all_streams[k].device == current())) found = k;
    if (found >= 0) {
        all_streams[found].open = 1;
        all_streams[found].device = current();
        if (!all_streams[found].first) all_streams[found].end = &all_streams[found].first;
        streams++;
    }
    pthread_mutex_unlock(&lock);
    *stream = (void *)(found + 1);
    return found < 0 ? OUT_OF_MEMORY : DONE;
}

int stand_in_open_streams(void) {
    pthread_mutex_lock(&lock);
    int open = streams;
    pthread_mutex_unlock(&lock);
    return open;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    NEEDS_CONTEXT;
    *least = 0, *greatest = -5;
    return DONE;
}

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return priority > 0 || priority < -5 ? INVALID_VALUE : cuStreamCreate(stream, flags);
}

/* The stream's work continues, as with a real driver. */
int cuStreamDestroy_v2(void *handle) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    if (stream) {
        stream->open = 0;
        streams--;
    }
    pthread_mutex_unlock(&lock);
    return stream ? DONE : INVALID_VALUE;
}

int cuStreamQuery(void *handle) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(&query_code);
    if (is_capturing(handle)) return invalidated();
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    int answer = !stream ? INVALID_VALUE : stream->done < stream->given ? NOT_READY : DONE;
    pthread_mutex_unlock(&lock);
    return answer;
}

int cuStreamSynchronize(void *handle) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(&synchronize_code);
    if (is_capturing(handle)) return invalidated();
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    if (stream) finish(stream);
    pthread_mutex_unlock(&lock);
    return stream ? DONE : INVALID_VALUE;
}

int cuStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    struct event *event = event_of(event_handle);
    int given = (handle && !stream) || !event || flags ? INVALID_VALUE : DONE;
    if (given == DONE && stream && event->stream >= 0)
        given = give(stream, (struct work){.what = AWAIT, .other = event->stream, .value = event->at});
    pthread_mutex_unlock(&lock);
    return given;
}

int cuEventCreate(void **event, unsigned flags) {
    NEEDS_CONTEXT;
    wait_while_held();
    if (flags != 2) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    long found = -1;
    for (int k = 0; k < EVENTS && found < 0; k++)
        if (!all_events[k].open) found = k;
    if (found >= 0) {
        all_events[found] = (struct event){.open = 1, .device = current(), .stream = -1};
        events++;
    }
    pthread_mutex_unlock(&lock);
    *event = (void *)(found + 1);
    return found < 0 ? OUT_OF_MEMORY : DONE;
}

int cuEventDestroy_v2(void *handle) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct event *event = event_of(handle);
    if (event) {
        event->open = 0;
        events--;
    }
    pthread_mutex_unlock(&lock);
    return event ? DONE : INVALID_VALUE;
}

/* In the default stream, where nothing is ever under way, it is done at once. */
int cuEventRecord(void *handle, void *stream_handle) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct event *event = event_of(handle);
    struct stream *stream = stream_of(stream_handle);
    int done = event && (stream || !stream_handle) ? DONE : INVALID_VALUE;
    if (done == DONE && event->device != (stream ? stream->device : current())) done = INVALID_HANDLE;
    if (done == DONE) {
        event->stream = is_capturing(stream_handle) ? IN_A_GRAPH : stream ? (int)(stream - all_streams) : -1;
        event->at = stream ? stream->given : 0;
    }
    pthread_mutex_unlock(&lock);
    return done;
}

int cuEventQuery(void *handle) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(&query_code);
    pthread_mutex_lock(&lock);
    struct event *event = event_of(handle);
    int pending = event && event->stream >= 0 && all_streams[event->stream].done < event->at;
    pthread_mutex_unlock(&lock);
    return !event ? INVALID_VALUE : event->stream == IN_A_GRAPH ? CAPTURED_EVENT : pending ? NOT_READY : DONE;
}

#ifdef KERNELS
/* A driver may do so before it loads a kernel, or unloads one. */
static void wait_for_all(void) {
    pthread_mutex_lock(&lock);
    finish_all(current());
    pthread_mutex_unlock(&lock);
}

int cuModuleLoadData(void **module, const void *image) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(NULL);
    wait_for_all();
    *module = &contexts[current()];
    return strstr(image, ".visible .entry") ? DONE : INVALID_VALUE;
}

int cuModuleUnload(void *module) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(NULL);
    wait_for_all();
    return DONE;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    NEEDS_CONTEXT;
    int kernel = stand_in_kernel(name), device = (int *)module - contexts;
    *function = (void *)(long)(kernel + KERNELS_MAX * device);
    return kernel ? DONE : NOT_FOUND;
}


void stand_in_hold_kernels(int held) {
    pthread_mutex_lock(&lock);
    kernels_held = held;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
}

/* Memory that its owner frees just before a kernel is launched. */
static address freed_at_launch;

void stand_in_free_at_launch(address at) { freed_at_launch = at; }

/* A launch returns when its kernel has ended. */
static int launches_block;

void stand_in_block_launches(int block) { launches_block = block; }

/* Memory that another thread frees just after a kernel was launched. */
static address freed_after_launch;

/* Gives back what was not freed. */
address stand_in_free_after_launch(address at) { return __atomic_exchange_n(&freed_after_launch, at, __ATOMIC_SEQ_CST); }

int cuMemFree_v2(address at);
int cuCtxPushCurrent_v2(void *context);

static void *free_it(void *at) {
    cuCtxPushCurrent_v2(&contexts[0]);
    cuMemFree_v2((address)at);
    return NULL;
}

/* Memory that is freed when `questions_left` further queries have been answered. */
static address freed_after_questions;
static int questions_left;

/* Gives back what was not freed. */
address stand_in_free_after_questions(address at, int questions) {
    __atomic_store_n(&questions_left, questions, __ATOMIC_SEQ_CST);
    return __atomic_exchange_n(&freed_after_questions, at, __ATOMIC_SEQ_CST);
}

/* Of the memory that has its base there. */
static void answered(address base) {
    address freed = __atomic_load_n(&freed_after_questions, __ATOMIC_SEQ_CST);
    if (!freed || freed != base || __atomic_fetch_sub(&questions_left, 1, __ATOMIC_SEQ_CST) != 1) return;
    pthread_t owner;
    freed = __atomic_exchange_n(&freed_after_questions, 0, __ATOMIC_SEQ_CST);
    if (freed && !pthread_create(&owner, NULL, free_it, (void *)freed)) pthread_detach(owner);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y, unsigned block_z,
                   unsigned shared, void *handle, void **parameters, void **extra) {
    NEEDS_CONTEXT;
    if (!x || y != 1 || z != 1 || block_y != 1 || block_z != 1 || shared || extra) return INVALID_VALUE;
    int kernel = (int)((long)function % KERNELS_MAX), device = (int)((long)function / KERNELS_MAX);
    struct work work = {.what = KERNEL, .kernel = kernel, .blocks = x, .parameters = malloc(PARAMETERS)};
    address delay_ns = 0;
    int given = stand_in_take(work.kernel, block, parameters, work.parameters, &delay_ns) ? DONE : INVALID_VALUE;
    if (delay_ns) work.what = AWAIT, work.other = -1, work.value = delay_ns;
    address freed = __atomic_exchange_n(&freed_at_launch, 0, __ATOMIC_SEQ_CST);
    if (freed) cuMemFree_v2(freed);
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    given = given != DONE || !stream ? INVALID_VALUE : stream->device != device ? INVALID_HANDLE : give(stream, work);
    if (given == DONE && launches_block) finish(stream);
    pthread_mutex_unlock(&lock);
    if (given != DONE) free(work.parameters);
    pthread_t owner;
    freed = __atomic_exchange_n(&freed_after_launch, 0, __ATOMIC_SEQ_CST);
    if (freed && !pthread_create(&owner, NULL, free_it, (void *)freed)) pthread_detach(owner);
    return given;
}
#else
__attribute__((unused)) static void answered(address base) {}
int cuModuleLoadData(void **module, const void *image) { return NOT_SUPPORTED; }
int cuModuleUnload(void *module) { return NOT_SUPPORTED; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return NOT_FOUND; }
int cuLaunchKernel(void *function, ...) { return NOT_SUPPORTED; }
#endif
