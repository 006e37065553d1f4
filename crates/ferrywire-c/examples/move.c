/* Moves bytes from one process into the memory of another, with a notification.
 *
 *   cc -Iinclude examples/move.c -L../../target/release -lferrywire_c -Wl,-rpath,$PWD/../../target/release -o move
 *   ./move receive where    owns the memory: writes metadata and descriptor to the file "where", waits until it is filled
 *   ./move send where       fills the memory
 *
 * Between two hosts: listen on 0.0.0.0:0, give both ends a secret (ferrywire_options_secret), copy the file. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ferrywire.h"

enum { BYTES = 64 << 20, LIMIT_MS = 60000, ROOM = 4096 };

static unsigned char pattern(size_t at) { return (unsigned char)(at * 31 + (at >> 12)); }

/* Ends the program with ferrywire's message when a call fails. */
static void must(int status, const char *what) {
    if (status != FERRYWIRE_OK) {
        fprintf(stderr, "%s: %s (%d)\n", what, ferrywire_last_error(), status);
        exit(1);
    }
}

static void receive(const char *where) {
    ferrywire_options *options;
    ferrywire_endpoint *endpoint;
    ferrywire_region *region;
    ferrywire_peer *peer;
    must(ferrywire_options_new(&options), "options");
    must(ferrywire_options_listen(options, "127.0.0.1:0"), "listen");
    must(ferrywire_options_label(options, "receiver"), "label");
    must(ferrywire_endpoint_open(options, &endpoint), "open");
    ferrywire_options_free(options);
    must(ferrywire_allocate(endpoint, BYTES, &region), "allocate");

    unsigned char metadata[ROOM], descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    size_t sizes[2];
    must(ferrywire_endpoint_metadata(endpoint, metadata, sizeof metadata, &sizes[0]), "metadata");
    must(ferrywire_region_descriptor(region, descriptor, sizeof descriptor, &sizes[1]), "descriptor");
    char unfinished[ROOM];
    snprintf(unfinished, sizeof unfinished, "%s.new", where);
    FILE *file = fopen(unfinished, "wb");
    if (!file || fwrite(sizes, sizeof sizes, 1, file) != 1 || fwrite(metadata, sizes[0], 1, file) != 1 ||
        fwrite(descriptor, sizes[1], 1, file) != 1 || fclose(file) != 0 || rename(unfinished, where) != 0) {
        perror(where);
        exit(1);
    }

    char message[64];
    size_t bytes;
    must(ferrywire_accept(endpoint, LIMIT_MS, &peer), "accept");
    must(ferrywire_next_notification(peer, LIMIT_MS, message, sizeof message, &bytes), "notification");
    const unsigned char *memory = ferrywire_region_address(region);
    for (size_t at = 0; at < BYTES; at++) {
        if (memory[at] != pattern(at)) {
            fprintf(stderr, "byte %zu is wrong\n", at);
            exit(1);
        }
    }
    printf("%d bytes arrived and are right; told: %.*s\n", BYTES, (int)bytes, message);
    must(ferrywire_endpoint_close(endpoint, LIMIT_MS), "close");
    ferrywire_peer_free(peer);
    ferrywire_region_free(region);
    ferrywire_endpoint_free(endpoint);
}

static void send_to(const char *where) {
    size_t sizes[2];
    unsigned char metadata[ROOM], descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    FILE *file = fopen(where, "rb");
    if (!file || fread(sizes, sizeof sizes, 1, file) != 1 || sizes[0] > sizeof metadata ||
        sizes[1] > sizeof descriptor || fread(metadata, sizes[0], 1, file) != 1 ||
        fread(descriptor, sizes[1], 1, file) != 1) {
        fprintf(stderr, "%s: not written by \"receive\"\n", where);
        exit(1);
    }
    fclose(file);

    ferrywire_endpoint *endpoint;
    ferrywire_peer *peer;
    ferrywire_region *source;
    ferrywire_remote *target;
    ferrywire_transfer *transfer;
    unsigned char *memory = malloc(BYTES);
    for (size_t at = 0; at < BYTES; at++) memory[at] = pattern(at);
    must(ferrywire_endpoint_open(NULL, &endpoint), "open");
    must(ferrywire_connect_metadata(endpoint, metadata, sizes[0], LIMIT_MS, &peer), "connect");
    /* The library calls free() once nothing can touch the memory any more. */
    must(ferrywire_register(endpoint, memory, BYTES, free, memory, &source), "register");
    must(ferrywire_remote_open(descriptor, sizes[1], &target), "descriptor");
    must(ferrywire_write(peer, source, 0, target, 0, BYTES, "all there", 9, &transfer), "write");
    uint64_t moved;
    must(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, &moved), "wait");
    printf("%llu bytes moved\n", (unsigned long long)moved);
    must(ferrywire_peer_close(peer, LIMIT_MS), "close");
    ferrywire_transfer_free(transfer);
    ferrywire_remote_free(target);
    ferrywire_region_free(source);
    ferrywire_peer_free(peer);
    ferrywire_endpoint_free(endpoint);
}

int main(int count, char **words) {
    if (count == 3 && strcmp(words[1], "receive") == 0) {
        receive(words[2]);
    } else if (count == 3 && strcmp(words[1], "send") == 0) {
        send_to(words[2]);
    } else {
        fprintf(stderr, "usage: %s receive|send FILE\n", words[0]);
        return 2;
    }
    return 0;
}
