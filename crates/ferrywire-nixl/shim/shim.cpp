// NIXL's C++ objects around the Rust core. Each method converts its arguments to plain data and calls the core; the core
// decides everything. No exception leaves a method, because NIXL catches none.

#include "core.h"
#include "nixl.hpp"

#include <cxxabi.h>
#include <new>

// Containers call this function since GCC 11. The user's libstdc++ may be older and lack it, but has the calls below.
namespace std {
[[noreturn]] void __throw_bad_array_new_length() { abi::__cxa_throw_bad_array_new_length(); }
} // namespace std

namespace {

using namespace ferrywire_nixl;

const FerrywireCore *core;

FerrywireBytes bytes_of(const std::string &text) { return {text.data(), text.size()}; }

bool put_bytes(void *into, FerrywireBytes bytes) noexcept {
    try {
        static_cast<std::string *>(into)->assign(bytes.data, bytes.size);
        return true;
    } catch (...) {
        return false;
    }
}

bool put_notification(void *into, FerrywireBytes agent, FerrywireBytes message) noexcept {
    try {
        static_cast<Notifications *>(into)->emplace_back(std::string(agent.data, agent.size),
                                                         std::string(message.data, message.size));
        return true;
    } catch (...) {
        return false;
    }
}

bool put_option(void *into, FerrywireBytes key, FerrywireBytes value) noexcept {
    try {
        static_cast<Parameters *>(into)->emplace(std::string(key.data, key.size), std::string(value.data, value.size));
        return true;
    } catch (...) {
        return false;
    }
}

// The counted reference to memory, at the offset where the core reads it.
class CoreMetadata final : public Metadata {
  public:
    CoreMetadata(bool is_private, const void *memory) : Metadata(is_private), memory(memory) {}
    ~CoreMetadata() override { core->drop_memory(memory); }
    CoreMetadata(const CoreMetadata &) = delete;
    CoreMetadata &operator=(const CoreMetadata &) = delete;

    const void *memory;
};

#ifdef __x86_64__
static_assert(offsetof(CoreMetadata, memory) == 16);
#endif

class CoreRequest final : public Request {
  public:
    explicit CoreRequest(void *transfer) : transfer(transfer) {}
    ~CoreRequest() override { core->release(transfer); }
    CoreRequest(const CoreRequest &) = delete;
    CoreRequest &operator=(const CoreRequest &) = delete;

    void *transfer;
};

// Owns a result of the core until an object of this file owns it.
Status wrap(const void *memory, bool is_private, Metadata *&out) {
    auto *metadata = new (std::nothrow) CoreMetadata(is_private, memory);
    if (metadata == nullptr) {
        core->drop_memory(memory);
        return backend_error;
    }
    out = metadata;
    return success;
}

const void *memory_of(const Metadata *metadata) { return static_cast<const CoreMetadata *>(metadata)->memory; }

class CoreEngine final : public Engine {
  public:
    CoreEngine(const InitParameters &parameters, void *agent) : Engine(parameters), agent(agent) {}
    ~CoreEngine() override { core->destroy(agent); }
    CoreEngine(const CoreEngine &) = delete;
    CoreEngine &operator=(const CoreEngine &) = delete;

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_notifications() const override { return true; }

    Memories memories() const override {
        try {
            return core->has_gpus(agent) ? Memories{Memory::dram, Memory::vram} : Memories{Memory::dram};
        } catch (...) {
            return {};
        }
    }

    Status register_memory(const BlobDescriptor &what, const Memory &type, Metadata *&out) override {
        const void *memory = nullptr;
        const auto status = core->register_memory(agent, what.address, what.bytes, what.device,
                                                  static_cast<uint32_t>(type), &memory);
        return status == success ? wrap(memory, true, out) : Status(status);
    }

    Status deregister_memory(Metadata *metadata) override {
        if (metadata == nullptr) {
            return invalid_parameter;
        }
        const auto status = core->deregister_memory(agent, memory_of(metadata));
        delete metadata;
        return Status(status);
    }

    Status connect(const std::string &peer) override { return Status(core->connect(agent, bytes_of(peer))); }
    Status disconnect(const std::string &peer) override { return Status(core->disconnect(agent, bytes_of(peer))); }

    Status unload(Metadata *metadata) override {
        delete metadata;
        return success;
    }

    Status prepare(const Operation &operation, const Descriptors &local, const Descriptors &remote,
                   const std::string &peer, Request *&out, const Options *) const override {
        void *transfer = nullptr;
        const auto status =
            core->prepare(agent, static_cast<uint32_t>(operation), local.items.data(), local.items.size(),
                          remote.items.data(), remote.items.size(), bytes_of(peer), &transfer);
        if (status != success) {
            return Status(status);
        }
        out = new (std::nothrow) CoreRequest(transfer);
        if (out == nullptr) {
            core->release(transfer);
            return backend_error;
        }
        return success;
    }

    Status post(const Operation &, const Descriptors &, const Descriptors &, const std::string &, Request *&request,
                const Options *options) const override {
        if (request == nullptr) {
            return invalid_parameter;
        }
        FerrywireBytes notification{};
        const bool notifies = options != nullptr && options->has_notification;
        if (notifies) {
            notification = bytes_of(options->notification);
        }
        return Status(core->post(agent, transfer_of(request), notifies ? &notification : nullptr));
    }

    Status check(Request *request) const override {
        return request == nullptr ? invalid_parameter : Status(core->check(agent, transfer_of(request)));
    }

    Status release(Request *request) const override {
        delete request;
        return success;
    }

    Status public_data(const Metadata *metadata, std::string &out) const override {
        return metadata == nullptr ? invalid_parameter
                                   : Status(core->public_data(memory_of(metadata), &out, put_bytes));
    }

    Status connection_info(std::string &out) const override {
        return Status(core->connection_info(agent, &out, put_bytes));
    }

    Status load_connection_info(const std::string &peer, const std::string &info) override {
        return Status(core->load_connection_info(agent, bytes_of(peer), bytes_of(info)));
    }

    Status load_remote(const BlobDescriptor &what, const Memory &, const std::string &peer, Metadata *&out) override {
        const void *memory = nullptr;
        const auto status = core->load_remote(agent, bytes_of(peer), bytes_of(what.blob), &memory);
        return status == success ? wrap(memory, false, out) : Status(status);
    }

    Status load_local(Metadata *in, Metadata *&out) override {
        return in == nullptr ? invalid_parameter : wrap(core->clone_memory(memory_of(in)), true, out);
    }

    Status notifications(Notifications &out) override {
        return Status(core->notifications(agent, &out, put_notification));
    }

    Status notify(const std::string &peer, const std::string &message) const override {
        return Status(core->notify(agent, bytes_of(peer), bytes_of(message)));
    }

  private:
    static void *transfer_of(Request *request) { return static_cast<CoreRequest *>(request)->transfer; }

    void *agent;
};

Engine *create(const InitParameters *parameters) noexcept {
    if (parameters == nullptr || parameters->custom == nullptr) {
        return nullptr;
    }
    try {
        std::vector<FerrywireParameter> custom;
        for (const auto &[key, value] : *parameters->custom) {
            custom.push_back({bytes_of(key), bytes_of(value)});
        }
        void *agent = core->create(bytes_of(parameters->local_agent), bytes_of(parameters->type), custom.data(),
                                   custom.size());
        if (agent == nullptr) {
            return nullptr;
        }
        try {
            return new CoreEngine(*parameters, agent);
        } catch (...) {
            core->destroy(agent);
            return nullptr;
        }
    } catch (...) {
        return nullptr;
    }
}

void destroy(Engine *engine) noexcept { delete engine; }

const char *name() noexcept { return "FERRYWIRE"; }

const char *version() noexcept { return core->version; }

Parameters options() noexcept {
    Parameters out;
    core->options(&out, put_option);
    return out;
}

// The kinds of memory depend on the host, so the engine is asked.
Memories all_memories() noexcept {
    try {
        return {Memory::dram, Memory::vram};
    } catch (...) {
        return {};
    }
}

} // namespace

extern "C" void *ferrywire_nixl_plugin(const FerrywireCore *table) {
    static Plugin plugin = {1, create, destroy, name, version, options, all_memories};
    core = table;
    return &plugin;
}
