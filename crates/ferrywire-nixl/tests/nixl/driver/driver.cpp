// Calls the backend's table in the order of NIXL's library, and with invalid arguments.
//
// usage: driver CASE. Prints "CASE: good" at the end.

#include "../../../shim/nixl.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace ferrywire_nixl;

extern "C" void *nixl_plugin_init();
extern "C" void nixl_plugin_fini();
// The backend recognizes NIXL 1.0 or later by this symbol.
extern "C" void _ZNK9nixlAgent14releaseMemViewEPv() {}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

namespace {

constexpr Status not_posted = Status(-1), backend_failed = Status(-3), mismatch = Status(-5), not_allowed = Status(-6),
                 remote_disconnect = Status(-10);

constexpr auto LIMIT = std::chrono::seconds(120);

void wait_until(const std::function<bool()> &condition, const char *what) {
    const auto until = std::chrono::steady_clock::now() + LIMIT;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > until) {
            fprintf(stderr, "waited in vain for %s\n", what);
            exit(1);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

Plugin *plugin() { return static_cast<Plugin *>(nixl_plugin_init()); }

// Registered memory of an agent, with the metadata objects that NIXL keeps for it.
struct Registered {
    std::vector<uint8_t> bytes;
    Metadata *registration = nullptr, *local_view = nullptr;
    std::string blob;

    BlobDescriptor descriptor() {
        BlobDescriptor out;
        out.address = reinterpret_cast<uintptr_t>(bytes.data());
        out.bytes = bytes.size();
        out.device = 0;
        return out;
    }
};

class Agent {
  public:
    explicit Agent(const std::string &name, Parameters custom = {}) : name(name) {
        InitParameters parameters{};
        parameters.local_agent = name;
        parameters.type = "FERRYWIRE";
        parameters.custom = &custom;
        parameters.progress_thread = true;
        engine = plugin()->create(&parameters);
        CHECK(engine != nullptr && !engine->failed);
        CHECK(engine->supports_remote() && engine->supports_notifications() && engine->supports_local());
        CHECK(engine->connection_info(info) == success && !info.empty());
        CHECK(engine->connect(name) == success);
        const auto memories = engine->memories();
        CHECK(!memories.empty() && memories[0] == Memory::dram);
        CHECK(engine->type == "FERRYWIRE" && engine->local_agent == name && engine->custom == custom);
    }

    ~Agent() {
        for (auto &memory : registered) {
            CHECK(memory->registration == nullptr || engine->deregister_memory(memory->registration) == success);
        }
        for (auto &[_, metadata] : loaded) {
            CHECK(engine->unload(metadata) == success);
        }
        for (auto &memory : registered) {
            CHECK(memory->local_view == nullptr || engine->unload(memory->local_view) == success);
        }
        plugin()->destroy(engine);
    }

    Registered &add(size_t bytes, uint8_t value = 0) {
        registered.push_back(std::make_unique<Registered>());
        auto &memory = *registered.back();
        memory.bytes.assign(bytes, value);
        CHECK(engine->register_memory(memory.descriptor(), Memory::dram, memory.registration) == success);
        CHECK(engine->load_local(memory.registration, memory.local_view) == success);
        CHECK(engine->public_data(memory.registration, memory.blob) == success && !memory.blob.empty());
        return memory;
    }

    void deregister(Registered &memory) {
        CHECK(engine->unload(memory.local_view) == success);
        CHECK(engine->deregister_memory(memory.registration) == success);
        memory.local_view = memory.registration = nullptr;
    }

    // Loads connection information and all memory of another agent, as NIXL does from its metadata.
    void load(Agent &other) {
        CHECK(engine->load_connection_info(other.name, other.info) == success);
        for (auto &memory : other.registered) {
            load(other, *memory);
        }
    }

    void load(Agent &other, Registered &memory) {
        auto descriptor = memory.descriptor();
        descriptor.blob = memory.blob;
        CHECK(engine->load_remote(descriptor, Memory::dram, other.name, loaded[&memory]) == success);
    }

    void unload(Agent &other) {
        for (auto &memory : other.registered) {
            CHECK(engine->unload(loaded.at(memory.get())) == success);
            loaded.erase(memory.get());
        }
        CHECK(engine->disconnect(other.name) == success);
    }

    Notifications notifications() {
        Notifications out;
        CHECK(engine->notifications(out) == success);
        return out;
    }

    // Waits for the next `count` notifications.
    Notifications wait_for(size_t count) {
        Notifications out;
        wait_until(
            [&] {
                for (auto &each : notifications()) {
                    out.push_back(each);
                }
                return out.size() >= count;
            },
            "notifications");
        CHECK(out.size() == count);
        return out;
    }

    std::string name, info;
    Engine *engine;
    std::vector<std::unique_ptr<Registered>> registered;
    std::map<Registered *, Metadata *> loaded;
};

MetadataDescriptor part(Registered &memory, const Metadata *metadata, size_t offset, size_t bytes) {
    MetadataDescriptor out;
    out.address = reinterpret_cast<uintptr_t>(memory.bytes.data()) + offset;
    out.bytes = bytes;
    out.device = 0;
    out.metadata = metadata;
    return out;
}

// A transfer handle with its lists, which live as long.
class Handle {
  public:
    Handle(Agent &agent, Operation operation, const std::string &peer) : agent(agent), operation(operation), peer(peer) {
        local.virtual_functions = remote.virtual_functions = nullptr;
        local.memory = remote.memory = 0;
    }
    ~Handle() { release(); }

    void add(Registered &here, size_t at, Registered &there, size_t to, size_t bytes) {
        local.items.push_back(part(here, here.local_view, at, bytes));
        const bool own = peer == agent.name;
        remote.items.push_back(part(there, own ? there.local_view : agent.loaded.at(&there), to, bytes));
    }

    Status prepare() { return agent.engine->prepare(operation, local, remote, peer, request, &options); }

    Status post() { return agent.engine->post(operation, local, remote, peer, request, &options); }

    Status post(const std::string &notification) {
        options.notification = notification;
        options.has_notification = true;
        return post();
    }

    Status finish(Status status) {
        wait_until(
            [&] {
                if (status == in_progress) {
                    status = agent.engine->check(request);
                }
                return status != in_progress;
            },
            "a transfer");
        return status;
    }

    void release() {
        if (request != nullptr) {
            CHECK(agent.engine->release(request) == success);
            request = nullptr;
        }
    }

    Agent &agent;
    Operation operation;
    std::string peer;
    Descriptors local, remote;
    Options options{};
    Request *request = nullptr;
};

void fill(std::vector<uint8_t> &bytes, uint32_t seed) {
    for (auto &byte : bytes) {
        seed = seed * 1664525 + 1013904223;
        byte = static_cast<uint8_t>(seed >> 24);
    }
}

void the_record_is_what_nixl_expects() {
    for (int round = 0; round < 3; ++round) {
        auto *record = plugin();
        CHECK(record != nullptr && record->api_version == 1);
        CHECK(std::string(record->name()) == "FERRYWIRE" && record->version()[0] != 0);
        CHECK(record->memories() == (Memories{Memory::dram, Memory::vram}));
        const auto options = record->options();
        CHECK(options.count("port") == 1);
        nixl_plugin_fini();
        // Programs pass the defaults back.
        Agent agent("a", options);
    }
}

void bytes_and_notifications_arrive() {
    Agent near("near"), far("far");
    auto &source = near.add(4 << 20);
    auto &target = far.add(4 << 20);
    fill(source.bytes, 1);
    near.load(far);
    // Every block moves to another offset, first while there is no connection, then repeatedly.
    Handle write(near, Operation::write, "far");
    const size_t block = 4096, blocks = (4 << 20) / block;
    for (size_t at = 0; at < blocks; ++at) {
        write.add(source, at * block, target, (at * 5 + 3) % blocks * block, block);
    }
    CHECK(write.prepare() == success);
    for (int round = 0; round < 20; ++round) {
        fill(source.bytes, 100 + round);
        const auto message = "round " + std::to_string(round);
        CHECK(write.finish(write.post(message)) == success);
        CHECK(far.wait_for(1) == (Notifications{{"near", message}}));
        for (size_t at = 0; at < blocks; ++at) {
            CHECK(memcmp(&source.bytes[at * block], &target.bytes[(at * 5 + 3) % blocks * block], block) == 0);
        }
    }
    // The opposite direction, although the far end has loaded nothing.
    const auto sent = source.bytes;
    fill(source.bytes, 7);
    Handle read(near, Operation::read, "far");
    for (size_t at = 0; at < blocks; ++at) {
        read.add(source, at * block, target, (at * 5 + 3) % blocks * block, block);
    }
    CHECK(read.prepare() == success && read.finish(read.post("")) == success && source.bytes == sent);
    CHECK(far.wait_for(1) == (Notifications{{"near", ""}}));
    // Separate notifications, short and long, with zero bytes, in order.
    Notifications expected;
    for (size_t bytes : {0, 1, 8000, 8192, 100000, 5}) {
        std::string message(bytes, '\0');
        if (bytes > 1) {
            message[bytes - 1] = 'x';
        }
        expected.emplace_back("near", message);
        CHECK(near.engine->notify("far", message) == success);
    }
    CHECK(far.wait_for(expected.size()) == expected);
    // A long notification with a transfer.
    const std::string message(50000, 'n');
    CHECK(write.finish(write.post(message)) == success);
    CHECK(far.wait_for(1) == (Notifications{{"near", message}}));
    CHECK(near.notifications().empty() && far.notifications().empty());
}

void many_registrations_are_one_transfer() {
    Agent near("near"), far("far");
    std::vector<Registered *> sources, targets;
    for (uint32_t index = 0; index < 1000; ++index) {
        sources.push_back(&near.add(4096));
        targets.push_back(&far.add(4096));
        fill(sources.back()->bytes, index);
    }
    near.load(far);
    Handle write(near, Operation::write, "far");
    for (size_t index = 0; index < 1000; ++index) {
        write.add(*sources[index], 0, *targets[index * 7 % 1000], 0, 4096);
    }
    CHECK(write.prepare() == success && write.finish(write.post("all")) == success);
    CHECK(far.wait_for(1) == (Notifications{{"near", "all"}}));
    for (size_t index = 0; index < 1000; ++index) {
        CHECK(sources[index]->bytes == targets[index * 7 % 1000]->bytes);
    }
    // 100,000 blocks between two registrations.
    auto &source = near.add(100000 * 64), &target = far.add(100000 * 64);
    near.load(far, target);
    fill(source.bytes, 5);
    Handle blocks(near, Operation::write, "far");
    for (size_t at = 0; at < 100000; ++at) {
        blocks.add(source, at * 64, target, at * 77777 % 100000 * 64, 64);
    }
    CHECK(blocks.prepare() == success && blocks.finish(blocks.post()) == success);
    for (size_t at = 0; at < 100000; ++at) {
        CHECK(memcmp(&source.bytes[at * 64], &target.bytes[at * 77777 % 100000 * 64], 64) == 0);
    }
}

void an_agent_reaches_itself() {
    Agent agent("self");
    auto &one = agent.add(3 << 20), &two = agent.add(3 << 20);
    fill(one.bytes, 3);
    Handle write(agent, Operation::write, "self"), read(agent, Operation::read, "self");
    write.add(one, 1, two, 5, (3 << 20) - 5);
    read.add(one, 0, two, 0, 5);
    CHECK(write.prepare() == success && write.post("to myself") == success);
    CHECK(memcmp(&one.bytes[1], &two.bytes[5], (3 << 20) - 5) == 0);
    CHECK(read.prepare() == success && read.post() == success && one.bytes[4] == two.bytes[4]);
    CHECK(agent.engine->notify("self", "again") == success);
    CHECK(agent.wait_for(2) == (Notifications{{"self", "to myself"}, {"self", "again"}}));
}

void misuse_gives_errors() {
    Agent near("near"), far("far");
    auto &source = near.add(8192);
    auto &target = far.add(8192);
    CHECK(near.engine->connect("far") == not_found && near.engine->disconnect("far") == not_found);
    CHECK(near.engine->notify("far", "x") == not_found);
    CHECK(near.engine->load_connection_info("far", "a worker address of another backend") == mismatch);
    CHECK(near.engine->load_connection_info("far", "") == mismatch);
    CHECK(near.engine->load_connection_info("far", far.info.substr(0, far.info.size() - 1)) == mismatch);
    near.load(far);
    Metadata *none = nullptr;
    auto descriptor = target.descriptor();
    for (const std::string &blob : {std::string(), std::string("nonsense"), target.blob.substr(1), near.registered[0]->blob}) {
        descriptor.blob = blob;
        CHECK(near.engine->load_remote(descriptor, Memory::dram, "far", none) == mismatch && none == nullptr);
    }
    CHECK(near.engine->register_memory(source.descriptor(), Memory::vram, none) == invalid_parameter && none == nullptr);
    BlobDescriptor wrong{};
    wrong.bytes = 4096;
    CHECK(near.engine->register_memory(wrong, Memory::dram, none) == invalid_parameter);
    // Empty, identical and overlapping ranges.
    BlobDescriptor empty = source.descriptor();
    empty.bytes = 0;
    for (auto &each : {empty, source.descriptor(), source.descriptor()}) {
        CHECK(near.engine->register_memory(each, Memory::dram, none) == success);
        CHECK(near.engine->deregister_memory(none) == success);
        none = nullptr;
    }
    CHECK(near.engine->deregister_memory(nullptr) == invalid_parameter);
    CHECK(near.engine->unload(nullptr) == success && near.engine->release(nullptr) == success);
    CHECK(near.engine->check(nullptr) == invalid_parameter);
    const auto prepared = [&](Operation operation, const std::string &peer, const std::function<void(Handle &)> &add) {
        Handle handle(near, operation, peer);
        add(handle);
        const auto status = handle.prepare();
        CHECK((status == success) == (handle.request != nullptr));
        return status;
    };
    CHECK(prepared(Operation::write, "far", [](Handle &) {}) == invalid_parameter);
    const auto good = [&](Handle &handle) { handle.add(source, 0, target, 0, 8192); };
    CHECK(prepared(Operation::write, "far", good) == success);
    CHECK(prepared(Operation(7), "far", good) == not_supported);
    CHECK(prepared(Operation::write, "far", [&](Handle &handle) { good(handle), handle.peer = "nobody"; }) == not_found);
    CHECK(prepared(Operation::read, "far", [&](Handle &handle) { good(handle), handle.local.items[0].bytes = 1; }) ==
          invalid_parameter);
    CHECK(prepared(Operation::read, "far", [&](Handle &handle) { good(handle), handle.local.items.pop_back(); }) ==
          invalid_parameter);
    CHECK(prepared(Operation::write, "far", [&](Handle &handle) {
              good(handle);
              handle.remote.items[0].metadata = nullptr;
          }) == invalid_parameter);
    CHECK(prepared(Operation::write, "far", [&](Handle &handle) {
              good(handle);
              std::swap(handle.local.items[0].metadata, handle.remote.items[0].metadata);
          }) == invalid_parameter);
    for (const auto shift : {-1, 1}) {
        CHECK(prepared(Operation::write, "far", [&](Handle &handle) {
                  good(handle);
                  handle.remote.items[0].address += shift;
              }) == invalid_parameter);
    }
    // A handle that was never posted, and one without descriptors.
    Handle unposted(near, Operation::write, "far"), nothing(near, Operation::write, "far");
    good(unposted);
    CHECK(unposted.prepare() == success && near.engine->check(unposted.request) == not_posted);
    nothing.add(source, 0, target, 0, 0);
    CHECK(nothing.prepare() == success && nothing.finish(nothing.post("nothing")) == success);
    CHECK(far.wait_for(1) == (Notifications{{"near", "nothing"}}));
    // Memory that the far end has deregistered is refused, without other effects.
    far.deregister(target);
    CHECK(unposted.finish(unposted.post("late")) == not_allowed);
    CHECK(near.engine->notify("far", "still here") == success);
    CHECK(far.wait_for(1) == (Notifications{{"near", "still here"}}));
}

void parameters_are_tolerated_or_named() {
    Agent tolerant("a", {{"num_threads", "8"}, {"ucx_error_handling_mode", "peer"}, {"port", ""}, {"nics", ""}});
    for (const Parameters &bad :
         {Parameters{{"port", "many"}}, Parameters{{"nics", "no such nic"}}, Parameters{{"nics", "lo,nope"}}}) {
        auto custom = bad;
        InitParameters parameters{};
        parameters.local_agent = "b";
        parameters.type = "FERRYWIRE";
        parameters.custom = &custom;
        CHECK(plugin()->create(&parameters) == nullptr);
    }
}

void releasing_never_blocks() {
    Agent near("near"), far("far");
    auto &source = near.add(32 << 20), &target = far.add(32 << 20);
    near.load(far);
    for (int round = 0; round < 100; ++round) {
        const auto operation = round % 2 == 0 ? Operation::write : Operation::read;
        Handle handle(near, operation, "far");
        handle.add(source, 0, target, 0, 32 << 20);
        CHECK(handle.prepare() == success);
        CHECK(handle.post("maybe") != invalid_parameter);
        for (int check = 0; check < round * 20; ++check) {
            if (near.engine->check(handle.request) != in_progress) {
                break;
            }
        }
        handle.release();
    }
    // Nothing remains that would delay the next transfer.
    Handle handle(near, Operation::write, "far");
    handle.add(source, 0, target, 0, 4096);
    CHECK(handle.prepare() == success && handle.finish(handle.post("last")) == success);
    wait_until(
        [&] {
            for (auto &each : far.notifications()) {
                if (each.second == "last") {
                    return true;
                }
            }
            return false;
        },
        "the last notification");
}

void a_peer_is_removed_and_added_again_in_mid_transfer() {
    Agent near("near"), far("far");
    auto &source = near.add(16 << 20, 1), &target = far.add(16 << 20);
    for (int round = 0; round < 20; ++round) {
        near.load(far);
        auto handle = std::make_unique<Handle>(near, Operation::write, "far");
        handle->add(source, 0, target, 0, 16 << 20);
        CHECK(handle->prepare() == success && handle->post("data") == in_progress);
        if (round % 2 == 0) {
            near.engine->check(handle->request);
        }
        near.unload(far);
        // NIXL also releases handles that were left.
        near.engine->check(handle->request);
        handle->release();
    }
    near.load(far);
    Handle handle(near, Operation::write, "far");
    handle.add(source, 0, target, 0, 16 << 20);
    CHECK(handle.prepare() == success && handle.finish(handle.post()) == success);
    CHECK(target.bytes == source.bytes);
    // A known name is loaded again, as after a restart.
    Agent restarted("far");
    CHECK(near.engine->load_connection_info("far", restarted.info) == success);
    CHECK(near.engine->notify("far", "hello") == success);
    CHECK(restarted.wait_for(1) == (Notifications{{"near", "hello"}}));
}

// Regression: it was lost where the agent had begun to connect and not sent it yet.
void an_agent_that_ends_sends_its_notification_first() {
    Agent far("far");
    for (int round = 0; round < 20; ++round) {
        {
            Agent near("near");
            near.load(far);
            CHECK(near.engine->notify("far", "bye") == success);
        }
        CHECK(far.wait_for(1) == (Notifications{{"near", "bye"}}));
    }
}

void memory_is_deregistered_in_mid_transfer() {
    Agent near("near"), far("far");
    auto &target = far.add(16 << 20);
    near.load(far);
    for (int round = 0; round < 20; ++round) {
        auto &source = near.add(16 << 20, 1);
        Handle handle(near, round % 2 == 0 ? Operation::write : Operation::read, "far");
        handle.add(source, 0, target, 0, 16 << 20);
        CHECK(handle.prepare() == success && handle.post() == in_progress);
        if (round % 3 == 0) {
            near.engine->check(handle.request);
        }
        near.deregister(source);
        // A late write would show here, because the pages belong to the test again.
        std::vector<uint8_t>().swap(source.bytes);
        handle.finish(in_progress);
    }
}

void a_dead_peer_is_an_error_on_every_handle() {
    Agent near("near"), other("other");
    auto &source = near.add(1 << 20, 1), &good = other.add(1 << 20);
    near.load(other);
    std::vector<std::unique_ptr<Handle>> handles;
    {
        auto far = std::make_unique<Agent>("far");
        auto &target = far->add(1 << 20);
        near.load(*far);
        for (int index = 0; index < 8; ++index) {
            handles.push_back(std::make_unique<Handle>(near, Operation::read, "far"));
            handles.back()->add(source, 0, target, 0, 1 << 20);
            CHECK(handles.back()->prepare() == success);
        }
        CHECK(handles[0]->finish(handles[0]->post()) == success);
    }
    for (auto &handle : handles) {
        CHECK(handle->finish(handle->post()) == remote_disconnect);
    }
    Handle write(near, Operation::write, "other");
    write.add(source, 0, good, 0, 1 << 20);
    CHECK(write.prepare() == success && write.finish(write.post()) == success && good.bytes == source.bytes);
    // NIXL drops far's registrations only when far is removed.
    handles.clear();
}

// Regression: the handle was done, and the notification waited for a connection that never came.
void a_read_whose_notification_cannot_be_sent_has_failed() {
    Agent near("near");
    auto &here = near.add(1 << 20);
    auto far = std::make_unique<Agent>("far");
    auto &there = far->add(1 << 20);
    fill(there.bytes, 3);
    const auto sent = there.bytes;
    near.load(*far);
    Handle read(near, Operation::read, "far"), after(near, Operation::read, "far");
    for (auto *handle : {&read, &after}) {
        handle->add(here, 0, there, 0, 1 << 20);
        CHECK(handle->prepare() == success);
    }
    CHECK(read.post("seen") == in_progress);
    wait_until([&] { return here.bytes == sent; }, "the bytes");
    far.reset();
    // The near agent knows then that the connection is lost.
    CHECK(after.finish(after.post()) == remote_disconnect);
    CHECK(read.finish(in_progress) == remote_disconnect);
}

void any_name_of_an_agent_will_do() {
    std::string far_east;
    for (int index = 0; index < 60; ++index) {
        far_east += "\xe6\xb8\xa1";
    }
    Agent near(far_east), far(std::string(1000, 'n')), plain("a\tb\nc");
    auto &source = near.add(4096, 3), &target = far.add(4096), &other = plain.add(4096);
    near.load(far);
    near.load(plain);
    Handle write(near, Operation::write, far.name), second(near, Operation::write, plain.name);
    write.add(source, 0, target, 0, 4096);
    second.add(source, 0, other, 0, 4096);
    CHECK(write.prepare() == success && write.finish(write.post("one")) == success);
    CHECK(second.prepare() == success && second.finish(second.post("two")) == success);
    CHECK(far.wait_for(1) == (Notifications{{far_east, "one"}}));
    CHECK(plain.wait_for(1) == (Notifications{{far_east, "two"}}));
    CHECK(target.bytes == source.bytes && other.bytes == source.bytes);
}

void a_forked_child_gets_errors() {
    Agent near("near"), far("far");
    auto &source = near.add(4096, 3), &target = far.add(4096);
    near.load(far);
    Handle first(near, Operation::write, "far"), second(near, Operation::write, "far");
    for (auto *handle : {&first, &second}) {
        handle->add(source, 0, target, 0, 4096);
        CHECK(handle->prepare() == success);
    }
    // Once without a connection, and once with one.
    for (bool connected : {false, true}) {
        if (connected) {
            CHECK(first.finish(first.post()) == success && target.bytes == source.bytes);
        }
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120);
            Notifications out;
            CHECK(second.post("late") == backend_failed && near.engine->check(first.request) == backend_failed);
            CHECK(near.engine->connect("far") == backend_failed && near.engine->notify("far", "x") == backend_failed);
            CHECK(near.engine->notifications(out) == backend_failed && out.empty());
            CHECK(near.engine->load_connection_info(far.name, far.info) == backend_failed);
            CHECK(near.engine->disconnect("far") == backend_failed);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(second.finish(second.post("mine")) == success && far.wait_for(1) == (Notifications{{"near", "mine"}}));
}

void a_forked_child_waits_for_no_lock_of_its_parent() {
    Agent near("near"), far("far");
    auto &source = near.add(4096, 3), &target = far.add(4096);
    near.load(far);
    Handle ended(near, Operation::write, "far");
    ended.add(source, 0, target, 0, 4096);
    CHECK(ended.prepare() == success && ended.finish(ended.post()) == success);
    std::atomic<bool> enough{false};
    // Two threads hold the locks of one transfer and of the list of all, again and again.
    std::thread checker([&] {
        while (!enough) {
            CHECK(near.engine->check(ended.request) == success);
        }
    });
    std::thread preparer([&] {
        while (!enough) {
            Handle handle(near, Operation::write, "far");
            handle.add(source, 0, target, 0, 4096);
            CHECK(handle.prepare() == success);
        }
    });
    for (int round = 0; round < 300; ++round) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120);
            CHECK(near.engine->release(ended.request) == success);
            CHECK(near.engine->deregister_memory(source.registration) == backend_failed);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    enough = true;
    checker.join();
    preparer.join();
}

size_t entries(const char *path) {
    size_t count = 0;
    auto *folder = opendir(path);
    CHECK(folder != nullptr);
    while (readdir(folder) != nullptr) {
        ++count;
    }
    closedir(folder);
    return count;
}

void rounds_leave_nothing_behind(int rounds) {
    size_t descriptors = 0, threads = 0;
    for (int round = 0; round < rounds; ++round) {
        if (round == 3) {
            descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
        }
        Agent near("near"), far("far");
        auto &source = near.add(4096, static_cast<uint8_t>(round)), &target = far.add(4096);
        near.load(far);
        Handle handle(near, Operation::write, "far");
        handle.add(source, 0, target, 0, 4096);
        CHECK(handle.prepare() == success && handle.finish(handle.post("x")) == success);
        CHECK(far.wait_for(1).size() == 1 && target.bytes == source.bytes);
    }
    // The agents of the last round are gone.
    CHECK(entries("/proc/self/fd") <= descriptors && entries("/proc/self/task") <= threads);
}

} // namespace

int main(int count, char **arguments) {
    const std::map<std::string, std::function<void()>> cases = {
        {"record", the_record_is_what_nixl_expects},
        {"arrive", bytes_and_notifications_arrive},
        {"many", many_registrations_are_one_transfer},
        {"itself", an_agent_reaches_itself},
        {"misuse", misuse_gives_errors},
        {"parameters", parameters_are_tolerated_or_named},
        {"release", releasing_never_blocks},
        {"again", a_peer_is_removed_and_added_again_in_mid_transfer},
        {"bye", an_agent_that_ends_sends_its_notification_first},
        {"deregister", memory_is_deregistered_in_mid_transfer},
        {"names", any_name_of_an_agent_will_do},
        {"forked", a_forked_child_gets_errors},
        {"locks", a_forked_child_waits_for_no_lock_of_its_parent},
        {"dead", a_dead_peer_is_an_error_on_every_handle},
        {"unnotified", a_read_whose_notification_cannot_be_sent_has_failed},
        {"unlogged",
         [] {
             CHECK(dup2(open("/dev/full", O_WRONLY), 2) == 2);
             a_dead_peer_is_an_error_on_every_handle();
         }},
        {"rounds", [&] { rounds_leave_nothing_behind(count > 2 ? atoi(arguments[2]) : 20); }},
    };
    CHECK(count > 1 && cases.count(arguments[1]) == 1);
    cases.at(arguments[1])();
    printf("%s: good\n", arguments[1]);
    return 0;
}
