/* Shared parts of the C tests: a check that names its line, and two connected endpoints of one process. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ferrywire.h"

enum { LIMIT_MS = 60000 };

#define CHECK(what)                                                                                   \
    do {                                                                                              \
        if (!(what)) {                                                                                \
            fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #what,         \
                    ferrywire_last_error());                                                          \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define OK(call) CHECK((call) == FERRYWIRE_OK)

/* The call fails with this status, and its words contain that. */
#define FAILS(call, status, words)                                                                    \
    do {                                                                                              \
        CHECK((call) == (status));                                                                    \
        CHECK(strstr(ferrywire_last_error(), (words)) != NULL);                                       \
    } while (0)

#define USAGE(call, words) FAILS(call, FERRYWIRE_ERROR_USAGE, words)

struct pair {
    ferrywire_endpoint *ends[2];
    ferrywire_peer *near, *far;
};

__attribute__((unused)) static struct pair connected(void) {
    struct pair pair;
    ferrywire_options *options;
    OK(ferrywire_options_new(&options));
    OK(ferrywire_options_listen(options, "127.0.0.1:0"));
    OK(ferrywire_options_channels(options, 2));
    OK(ferrywire_options_label(options, "receiver"));
    OK(ferrywire_endpoint_open(options, &pair.ends[1]));
    OK(ferrywire_endpoint_open(NULL, &pair.ends[0]));
    OK(ferrywire_options_free(options));
    char address[64];
    OK(ferrywire_endpoint_address(pair.ends[1], address, sizeof address, NULL));
    OK(ferrywire_connect(pair.ends[0], address, LIMIT_MS, &pair.near));
    OK(ferrywire_accept(pair.ends[1], LIMIT_MS, &pair.far));
    return pair;
}

__attribute__((unused)) static ferrywire_remote *remote_of(ferrywire_region *region) {
    unsigned char descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    size_t bytes;
    ferrywire_remote *remote;
    OK(ferrywire_region_descriptor(region, descriptor, sizeof descriptor, &bytes));
    OK(ferrywire_remote_open(descriptor, bytes, &remote));
    return remote;
}
