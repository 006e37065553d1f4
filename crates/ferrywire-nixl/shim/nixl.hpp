// The C++ boundary between NIXL (1.0 and later, Linux, x86-64 and others with the Itanium ABI) and a backend, as this
// project declares it: names are ours, layouts and the order of virtual functions are NIXL's, and asserted.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ferrywire_nixl {

enum class Memory : uint32_t { dram = 0, vram = 1 };
enum class Operation : uint32_t { read = 0, write = 1 };
enum class Cost : uint32_t { analytical = 0 };

enum Status : int32_t {
    in_progress = 1,
    success = 0,
    invalid_parameter = -2,
    backend_error = -3,
    not_found = -4,
    not_supported = -9,
};

using Parameters = std::unordered_map<std::string, std::string>;
using Memories = std::vector<Memory>;
using Notifications = std::vector<std::pair<std::string, std::string>>;

struct InitParameters {
    std::string local_agent;
    std::string type;
    Parameters *custom;
    bool progress_thread;
    uint64_t progress_delay_us;
    uint32_t sync_mode;
    bool telemetry;
};

// A backend's data about registered memory, local or of a peer.
class Metadata {
  public:
    explicit Metadata(bool is_private) : is_private(is_private) {}
    virtual ~Metadata() = default;

    bool is_private;
};

// The handle of a transfer.
class Request {
  public:
    virtual ~Request() = default;
};

struct Descriptor {
    uintptr_t address;
    size_t bytes;
    uint64_t device;
};

struct BlobDescriptor : Descriptor {
    std::string blob;
};

struct MetadataDescriptor : Descriptor {
    const Metadata *metadata;
};

// A descriptor list from NIXL. It is only read, so its virtual functions need not be declared.
template <typename T> struct List {
    const void *virtual_functions;
    uint32_t memory;
    std::vector<T> items;
};

using Descriptors = List<MetadataDescriptor>;
using Blobs = List<BlobDescriptor>;

struct Options {
    std::string notification;
    bool has_notification;
    std::string custom;
};

struct TelemetryEvent {
    uint32_t type;
    uint64_t value;
};

class Engine {
  public:
    explicit Engine(const InitParameters &parameters)
        : type(parameters.type), custom(*parameters.custom), failed(false), local_agent(parameters.local_agent),
          telemetry(parameters.telemetry) {}

    virtual ~Engine() = default;
    virtual bool supports_remote() const = 0;
    virtual bool supports_local() const = 0;
    virtual bool supports_notifications() const = 0;
    virtual Memories memories() const = 0;
    virtual Status register_memory(const BlobDescriptor &, const Memory &, Metadata *&out) = 0;
    virtual Status deregister_memory(Metadata *) = 0;
    virtual Status connect(const std::string &agent) = 0;
    virtual Status disconnect(const std::string &agent) = 0;
    virtual Status unload(Metadata *) = 0;
    virtual Status prepare(const Operation &, const Descriptors &local, const Descriptors &remote,
                           const std::string &agent, Request *&, const Options *) const = 0;
    virtual Status post(const Operation &, const Descriptors &local, const Descriptors &remote,
                        const std::string &agent, Request *&, const Options *) const = 0;
    virtual Status check(Request *) const = 0;
    virtual Status release(Request *) const = 0;
    virtual Status prepare_remote_view(const void *, void *&, const Options *) const { return not_supported; }
    virtual Status prepare_local_view(const Descriptors &, void *&, const Options *) const { return not_supported; }
    virtual void release_view(void *) const {}
    virtual Status public_data(const Metadata *, std::string &) const = 0;
    virtual Status connection_info(std::string &) const = 0;
    virtual Status load_connection_info(const std::string &agent, const std::string &info) = 0;
    virtual Status load_remote(const BlobDescriptor &, const Memory &, const std::string &agent, Metadata *&out) = 0;
    virtual Status load_local(Metadata *in, Metadata *&out) = 0;
    virtual Status notifications(Notifications &) = 0;
    virtual Status notify(const std::string &agent, const std::string &message) const = 0;
    virtual Status query(const Blobs &, std::vector<std::optional<Parameters>> &) const { return not_supported; }
    virtual Status estimate(const Operation &, const Descriptors &, const Descriptors &, const std::string &,
                            Request *const &, std::chrono::microseconds &, std::chrono::microseconds &, Cost &,
                            const void *) const {
        return not_supported;
    }

    // NIXL reads these fields directly.
    std::string type;
    Parameters custom;
    std::vector<TelemetryEvent> events;
    std::mutex events_lock;
    bool failed;
    std::string local_agent;
    bool telemetry;
};

struct Plugin {
    int api_version;
    Engine *(*create)(const InitParameters *);
    void (*destroy)(Engine *);
    const char *(*name)();
    const char *(*version)();
    Parameters (*options)();
    Memories (*memories)();
};

#ifdef __x86_64__
static_assert(sizeof(std::string) == 32 && sizeof(Parameters) == 56 && sizeof(std::mutex) == 40);
static_assert(sizeof(InitParameters) == 96 && offsetof(InitParameters, custom) == 64 &&
              offsetof(InitParameters, progress_delay_us) == 80 && offsetof(InitParameters, telemetry) == 92);
static_assert(sizeof(Engine) == 208 && offsetof(Engine, type) == 8 && offsetof(Engine, custom) == 40 &&
              offsetof(Engine, events) == 96 && offsetof(Engine, events_lock) == 120 &&
              offsetof(Engine, failed) == 160 && offsetof(Engine, local_agent) == 168 &&
              offsetof(Engine, telemetry) == 200);
static_assert(sizeof(Metadata) == 16 && offsetof(Metadata, is_private) == 8 && sizeof(Request) == 8);
static_assert(sizeof(Descriptor) == 24 && sizeof(BlobDescriptor) == 56 && offsetof(BlobDescriptor, blob) == 24);
static_assert(sizeof(MetadataDescriptor) == 32 && offsetof(MetadataDescriptor, metadata) == 24);
static_assert(sizeof(Descriptors) == 40 && offsetof(Descriptors, memory) == 8 && offsetof(Descriptors, items) == 16);
static_assert(sizeof(Options) == 72 && offsetof(Options, has_notification) == 32 && offsetof(Options, custom) == 40);
static_assert(sizeof(Plugin) == 56 && offsetof(Plugin, create) == 8 && offsetof(Plugin, memories) == 48);
static_assert(sizeof(TelemetryEvent) == 16);
#endif

} // namespace ferrywire_nixl
