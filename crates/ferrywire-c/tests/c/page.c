/* The function of docs/c.md, called: the test writes it into page.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "page.h"

enum { BYTES = 1 << 20, LIMIT_MS = 60000, ROOM = 4096 };

static void must(int status, const char *what) {
    if (status != FERRYWIRE_OK) {
        fprintf(stderr, "%s: %s (%d)\n", what, ferrywire_last_error(), status);
        exit(1);
    }
}

int main(void) {
    ferrywire_options *options;
    ferrywire_endpoint *endpoint;
    ferrywire_region *region;
    ferrywire_peer *peer;
    unsigned char metadata[ROOM], descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    size_t metadata_bytes, descriptor_bytes;
    must(ferrywire_options_new(&options), "options");
    must(ferrywire_options_listen(options, "127.0.0.1:0"), "listen");
    must(ferrywire_endpoint_open(options, &endpoint), "open");
    must(ferrywire_options_free(options), "free");
    must(ferrywire_allocate(endpoint, BYTES, &region), "allocate");
    must(ferrywire_endpoint_metadata(endpoint, metadata, sizeof metadata, &metadata_bytes), "metadata");
    must(ferrywire_region_descriptor(region, descriptor, sizeof descriptor, &descriptor_bytes), "descriptor");

    unsigned char *memory = malloc(BYTES);
    memset(memory, 7, BYTES);
    must(fill(metadata, metadata_bytes, descriptor, descriptor_bytes, memory, BYTES), "fill");
    char message[6];
    size_t bytes;
    must(ferrywire_accept(endpoint, LIMIT_MS, &peer), "accept");
    must(ferrywire_next_notification(peer, LIMIT_MS, message, sizeof message, &bytes), "notification");
    if (bytes != sizeof message || memcmp(message, "filled", bytes) != 0 ||
        memcmp(ferrywire_region_address(region), memory, BYTES) != 0) {
        fprintf(stderr, "the bytes or the notification are wrong\n");
        return 1;
    }
    free(memory);
    ferrywire_peer_free(peer);
    ferrywire_region_free(region);
    must(ferrywire_endpoint_close(endpoint, LIMIT_MS), "close");
    ferrywire_endpoint_free(endpoint);
    printf("page: good\n");
    return 0;
}
