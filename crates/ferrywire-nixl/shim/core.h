// The table of functions that the Rust side provides to the C++ side. No function throws or unwinds.

#pragma once

#include <stddef.h>
#include <stdint.h>

struct FerrywireBytes {
    const char *data;
    size_t size;
};

struct FerrywireParameter {
    struct FerrywireBytes key;
    struct FerrywireBytes value;
};

// Passes bytes to the caller that gave `into`; false if there is no memory for them.
typedef bool (*FerrywirePutBytes)(void *into, struct FerrywireBytes bytes);
typedef bool (*FerrywirePutNotification)(void *into, struct FerrywireBytes agent, struct FerrywireBytes message);

struct FerrywireCore {
    // Null on failure; the log has the reason.
    void *(*create)(struct FerrywireBytes agent, struct FerrywireBytes type, const struct FerrywireParameter *parameters,
                    size_t count);
    void (*destroy)(void *agent);
    bool (*has_gpus)(const void *agent);
    // `memory` objects are counted references to local memory or to a peer's memory.
    int32_t (*register_memory)(const void *agent, uintptr_t address, size_t bytes, uint64_t device, uint32_t type,
                               const void **memory);
    int32_t (*deregister_memory)(const void *agent, const void *memory);
    const void *(*clone_memory)(const void *memory);
    void (*drop_memory)(const void *memory);
    int32_t (*public_data)(const void *memory, void *into, FerrywirePutBytes put);
    int32_t (*load_remote)(const void *agent, struct FerrywireBytes peer, struct FerrywireBytes blob, const void **memory);
    int32_t (*connection_info)(const void *agent, void *into, FerrywirePutBytes put);
    int32_t (*load_connection_info)(const void *agent, struct FerrywireBytes peer, struct FerrywireBytes info);
    int32_t (*connect)(const void *agent, struct FerrywireBytes peer);
    int32_t (*disconnect)(const void *agent, struct FerrywireBytes peer);
    // Arrays of NIXL's descriptors: address, bytes, device, and a pointer to metadata with the memory at offset 16.
    int32_t (*prepare)(const void *agent, uint32_t operation, const void *local, size_t local_count, const void *remote,
                       size_t remote_count, struct FerrywireBytes peer, void **transfer);
    int32_t (*post)(const void *agent, const void *transfer, const struct FerrywireBytes *notification);
    int32_t (*check)(const void *agent, const void *transfer);
    void (*release)(void *transfer);
    int32_t (*notifications)(const void *agent, void *into, FerrywirePutNotification put);
    int32_t (*notify)(const void *agent, struct FerrywireBytes peer, struct FerrywireBytes message);
    // Calls `put` with the key and default value of each option.
    void (*options)(void *into, FerrywirePutNotification put);
    const char *version;
};
