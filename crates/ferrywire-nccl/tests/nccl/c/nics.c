/* Merged devices between two network namespaces, with a link for each NIC: nics PLUGIN VERSION CASE */
#pragma GCC diagnostic ignored "-Wunused-function"
#include "net.h"

enum { NICS_MAX = 8, IN_FLIGHT = 8, MESSAGE = 524288 };

static const char *path;

/* The parameters of a case. */
static struct {
    int wires, v6;
    /* The number of NICs that each end uses. */
    int here, there;
    /* Every NIC of the end with fewer NICs carries its share. */
    int shared;
    /* The first NIC is four times as fast as the second. */
    int unequal;
} of = { .wires = 2, .here = 2, .there = 2 };

static int net_merge(struct net *net, int count, const int *devices, int *made)
{
    struct {
        int count, devices[NICS_MAX];
    } props = { .count = count };
    int most = net->version == 12 ? 8 : 4;
    for (int n = 0; n < count && n < most; n++)
        props.devices[n] = devices[n];
    return ((int (*)(int *, void *))net->table[19])(made, &props);
}

static void address(char side, int wire, char *text, size_t room)
{
    int end = side == 'a' ? 1 : 2;
    snprintf(text, room, of.v6 ? "fd00:79:%d::%d" : "10.79.%d.%d", wire, end);
}

/* NICs a0, a1, .. or b0, b1, .., each of 100 Mbit/s or so unless they are unequal: slow enough that the NICs are the limit also
 * on a machine whose cores are busy, as shares would else follow who has a core. Their queues are longer than what the kernel
 * queues of a connection, so nothing is lost. */
static void nics_up(char side, int used)
{
    char names[128] = "=", ip[64], name[16];
    for (int wire = 0; wire < of.wires; wire++) {
        address(side, wire, ip, sizeof ip);
        snprintf(name, sizeof name, "%c%d", side, wire);
        shell("ip addr add %s/%d dev %s %s && ip link set %s up", ip, of.v6 ? 64 : 24, name, of.v6 ? "nodad" : "", name);
        shell("tc qdisc add dev %s root tbf rate %dmbit burst 64kb limit %d", name,
              of.unequal ? (wire ? 75 : 300) : 100, IN_FLIGHT * MESSAGE);
        if (wire < used)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", wire ? "," : "", name);
    }
    for (int wire = 0; wire < of.wires; wire++) {
        snprintf(name, sizeof name, "%c%d", side, wire);
        for (double since = now(); !is_up(name, of.v6 ? AF_INET6 : AF_INET);)
            again(since, "a link");
    }
    CHECK(setenv("NCCL_SOCKET_IFNAME", names, 1) == 0);
    CHECK(setenv("NCCL_SOCKET_FAMILY", of.v6 ? "AF_INET6" : "AF_INET", 1) == 0);
}

/* The plugin, with all used NICs as one device, or with the only one. */
static void load_merged(struct net *net, int used)
{
    static const int devices[NICS_MAX] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    net_open(net, path);
    CHECK(net_init(net, logger) == SUCCESS && net_devices(net) == used);
    net->device = 0;
    if (used > 1) {
        CHECK(net_merge(net, used, devices, &net->device) == SUCCESS && net->device == used);
        CHECK(net_devices(net) == used + 1);
    }
}

/* The number of bytes that a NIC has sent. */
static long long sent_bytes(char side, int wire)
{
    char line[512], name[16];
    long long sent = -1;
    FILE *file = fopen("/proc/self/net/dev", "r");
    CHECK(file);
    snprintf(name, sizeof name, "%c%d:", side, wire);
    while (fgets(line, sizeof line, file)) {
        char *start = line + strspn(line, " ");
        if (!strncmp(start, name, strlen(name)))
            CHECK(sscanf(start + strlen(name), "%*s %*s %*s %*s %*s %*s %*s %*s %lld", &sent) == 1);
    }
    fclose(file);
    CHECK(sent >= 0);
    return sent;
}

/* Connections that were dialled in this namespace. */
static long long dialled(void)
{
    char line[512];
    long long count = -1;
    FILE *file = fopen("/proc/self/net/snmp", "r");
    CHECK(file);
    /* The second line of this name has the numbers. */
    while (fgets(line, sizeof line, file))
        sscanf(line, "Tcp: %*d %*d %*d %*d %lld", &count);
    fclose(file);
    CHECK(count >= 0);
    return count;
}

/* Sends messages in one direction, several in flight; returns 0 or an error. */
static int stream(struct net *net, struct pair pair, int sends, int count)
{
    static unsigned char ring[IN_FLIGHT][MESSAGE];
    void *requests[IN_FLIGHT];
    double since = now(), moved = since;
    for (int begun = 0, ended = 0; ended < count; again(since, "a stream")) {
        if (begun < count && begun - ended < IN_FLIGHT) {
            unsigned char *data = ring[begun % IN_FLIGHT];
            void *request = NULL;
            int result;
            if (sends) {
                fill(data, MESSAGE, (unsigned)begun);
                result = net_isend(net, pair.send, data, MESSAGE, 0, &request);
            } else {
                result = net_irecv(net, pair.recv, data, MESSAGE, 0, &request);
            }
            if (result != SUCCESS)
                return result;
            requests[begun % IN_FLIGHT] = request;
            begun += request != NULL;
        }
        int done = 0, size = -1;
        int result = ended < begun ? net_test(net, requests[ended % IN_FLIGHT], &done, &size) : SUCCESS;
        if (result != SUCCESS)
            return result;
        if (done) {
            CHECK(size == MESSAGE && (sends || is_filled(ring[ended % IN_FLIGHT], MESSAGE, (unsigned)ended)));
            ended++;
            moved = now();
        } else {
            rest(moved);
        }
    }
    return SUCCESS;
}

/* There are as many pairs as the larger number of NICs: each must carry as much as the others, within a quarter. */
static int most(void)
{
    return of.here > of.there ? of.here : of.there;
}

/* One comm in each direction, used one after the other; each NIC carries its share of this end's bytes. */
static void exchange(struct net *net, int socket, char side, int used, int least)
{
    const int count = (of.unequal ? 32 : 16) * of.wires;
    long long before[NICS_MAX], total = 0;
    struct pair pair = pair_there(net, socket);
    for (int turn = 0; turn < 2; turn++) {
        int sends = turn == (side == 'a');
        both(socket);
        for (int wire = 0; wire < of.wires; wire++)
            before[wire] = sent_bytes(side, wire);
        CHECK(stream(net, pair, sends, count) == SUCCESS);
        both(socket);
        if (!sends)
            continue;
        for (int wire = 0; wire < of.wires; wire++) {
            long long sent = sent_bytes(side, wire) - before[wire];
            printf("v%d %c%d sent %lld of %lld bytes\n", net->version, side, wire, sent, (long long)count * MESSAGE);
            if (of.unequal)
                CHECK(sent > (long long)count * MESSAGE * (wire ? 10 : 65) / 100);
            else if (wire < least)
                CHECK(sent > (long long)count * MESSAGE / most() * 3 / 4);
            total += wire < used || of.shared == 0 ? sent : 0;
        }
        CHECK(total >= (long long)count * MESSAGE);
    }
    pair_close(net, pair);
}

static void ready(struct net *net, int socket, char side, int used)
{
    both(socket);
    nics_up(side, used);
    load_merged(net, used);
    both(socket);
}

static void namespace_here(int socket)
{
    CHECK(unshare(CLONE_NEWNET) == 0);
    both(socket);
    for (int wire = 0; wire < of.wires; wire++)
        shell("ip link add a%d type veth peer name b%d netns %d", wire, wire, (int)peer);
}

static void namespace_there(int socket)
{
    CHECK(unshare(CLONE_NEWNET) == 0);
    both(socket);
}

static int least(void)
{
    return of.here < of.there ? of.here : of.there;
}

static void carried_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', of.there);
    exchange(net, socket, 'b', of.there, least());
    CHECK(warnings == 0);
}

static void carried_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', of.here);
    exchange(net, socket, 'a', of.here, least());
    CHECK(warnings == 0);
}

static void carried(struct net *net, int wires, int here, int there, int v6)
{
    of.wires = wires, of.here = here, of.there = there, of.v6 = v6, of.shared = here == there;
    two(net, carried_there, carried_here, 0);
}

static void two_nics(struct net *net) { carried(net, 2, 2, 2, 0); }
static void two_nics_v6(struct net *net) { carried(net, 2, 2, 2, 1); }
static void four_nics(struct net *net) { carried(net, 4, 4, 4, 0); }
static void four_nics_v6(struct net *net) { carried(net, 4, 4, 4, 1); }
/* A NIC that the other end does not use is reached by the routing table. */
static void two_and_three(struct net *net) { carried(net, 3, 2, 3, 0); }
static void unequal_nics(struct net *net)
{
    of.unequal = 1;
    carried(net, 2, 2, 2, 0);
}

static void one_and_two(struct net *net) { carried(net, 2, 1, 2, 1); }

/* Each invalid request is refused with a log line; a repeated request returns the same device. */
static void merging(struct net *net)
{
    unsigned char room[256];
    int made = 77, again_made = 77, count = net->version == 12 ? 8 : 4;
    size_t size = net->version == 10 ? 104 : net->version == 11 ? 112 : 128;
    CHECK(unshare(CLONE_NEWNET) == 0);
    shell("ip link set lo up");
    for (int wire = 0; wire < 3; wire++)
        shell("ip link add a%d type veth peer name a%d", 2 * wire, 2 * wire + 1);
    of.wires = 6;
    nics_up('a', 6);
    net_open(net, path);
    CHECK(net_init(net, logger) == SUCCESS && net_devices(net) == 6);
    CHECK(net_merge(net, 3, (int[]){ 4, 0, 2 }, &made) == SUCCESS && made == 6 && net_devices(net) == 7);
    CHECK(net_merge(net, 2, (int[]){ 1, 3 }, &made) == SUCCESS && made == 7 && net_devices(net) == 8);
    CHECK(net_merge(net, 3, (int[]){ 4, 0, 2 }, &again_made) == SUCCESS && again_made == 6);
    /* Versions before 2.27 also ask for single NICs, and forget them beside merged devices unless they are counted. */
    CHECK(net_merge(net, 1, (int[]){ 5 }, &made) == SUCCESS && made == 5 && net_devices(net) == 9);
    char *alone[2];
    for (int n = 0; n < 2; n++) {
        CHECK(net_properties(net, n ? 8 : 5, room) == SUCCESS && *(int *)(room + 64) == 1 && *(int *)(room + 68) == 5);
        alone[n] = *(char **)room;
    }
    CHECK(!strcmp(alone[0], alone[1]));
    /* NCCL would not find devices without a PCI function: no mistake of the user, so no warning. */
    CHECK(unsetenv("FERRYWIRE_NCCL_MERGE") == 0);
    CHECK(net_merge(net, 3, (int[]){ 4, 0, 2 }, &again_made) != SUCCESS && warnings == 0);
    CHECK(setenv("FERRYWIRE_NCCL_MERGE", "any", 1) == 0);
    char *names[3], joined[64];
    for (int n = 0; n < 3; n++) {
        CHECK(net_properties(net, (int[]){ 4, 0, 2 }[n], room) == SUCCESS);
        names[n] = *(char **)room;
    }
    snprintf(joined, sizeof joined, "%s+%s+%s", names[0], names[1], names[2]);
    memset(room, 0xA5, sizeof room);
    CHECK(net_properties(net, 6, room) == SUCCESS && warnings == 0);
#define INT(at) (*(int *)(room + (at)))
    CHECK(!strcmp(*(char **)room, joined) && *(char **)(room + 8) == NULL && *(uint64_t *)(room + 16) == 6);
    CHECK(INT(24) == HOST && INT(36) == 30000 && *(float *)(room + 44) == 0);
    CHECK(INT(64) == 3 && INT(68) == 4 && INT(72) == 0 && INT(76) == 2);
    for (int n = 3; n < count; n++)
        CHECK(INT(68 + 4 * n) == 0);
    for (size_t at = size; at < sizeof room; at++)
        CHECK(room[at] == 0xA5);
    CHECK(net_properties(net, 0, room) == SUCCESS && INT(64) == 1 && INT(68) == 0);
    /* Merged members, missing members, one member twice, no members, and more than the version has room for. */
    const struct {
        int count, devices[2];
        const char *why;
    } wrong[] = { { 2, { 0, 6 }, "no device 6" }, { 2, { 0, 99 }, "no device 99" },
                  { 2, { -1, 0 }, "no device -1" }, { 2, { 1, 1 }, "named twice" },
                  { 0, { 0 }, "list of devices is empty" }, { -1, { 0, 1 }, "most" }, { count + 1, { 0, 1 }, "most" } };
    for (int n = 0; n < 7; n++) {
        made = 77;
        CHECK(net_merge(net, wrong[n].count, wrong[n].devices, &made) != SUCCESS && made == 77);
        CHECK(warnings == n + 1 && strstr(last_warning, wrong[n].why));
    }
    CHECK(net_devices(net) == 9);
    if (net->version == 12)
        CHECK(net_merge(net, 6, (int[]){ 0, 1, 2, 3, 4, 5 }, &made) == SUCCESS && made == 9);
    net->device = 6;
    struct pair pair = pair_here(net);
    message(net, pair, 3 << 20, 3 << 20, 1);
    message(net, pair, 100, 200, 2);
    /* NCCL has unloaded the plugin and loads it again: it counts the plain devices and merges as before. Devices from
     * before remain valid. */
    net_finalize(net);
    CHECK(net_init(net, logger) == SUCCESS && net_devices(net) == 6);
    CHECK(net_properties(net, 7, room) == SUCCESS && INT(64) == 2 && INT(68) == 1 && INT(72) == 3);
    CHECK(net_merge(net, 3, (int[]){ 4, 0, 2 }, &made) == SUCCESS && made == 6 && net_devices(net) == 7);
    /* Another communicator of this NCCL, which does not count again. */
    CHECK(net_init(net, logger) == SUCCESS);
    CHECK(net_merge(net, 2, (int[]){ 0, 1 }, &made) == SUCCESS && made == 7 && net_devices(net) == 8);
    CHECK(net_properties(net, 7, room) == SUCCESS && INT(64) == 2 && INT(68) == 0 && INT(72) == 1);
    message(net, pair, 3 << 20, 3 << 20, 3);
    pair_close(net, pair);
    CHECK(warnings == 7);
}

/* One comm in each direction, whose bytes all use one of the links. Returns the connections that this end has dialled. */
static long long over_one(struct net *net, int socket, char side, int wire)
{
    long long count = dialled();
    struct pair pair = pair_there(net, socket);
    count = dialled() - count;
    long long before = sent_bytes(side, wire);
    CHECK(stream(net, pair, side == 'a', 8) == SUCCESS);
    both(socket);
    CHECK(side == 'b' || sent_bytes(side, wire) - before >= 8LL * MESSAGE);
    pair_close(net, pair);
    return count;
}

/* Logged once, and nothing else. */
static void left_out(char side, int wire, const char *why, int so_far)
{
    char name[16];
    snprintf(name, sizeof name, "%c%d", side, wire);
    CHECK(warnings == so_far && strstr(last_warning, why) && strstr(last_warning, name));
}

/* After the devices are made, the second link is down or carries nothing; comms are set up over the first. */
static void over_the_first(struct net *net, int socket, char side, const char *why)
{
    for (int round = 0; round < 2; round++)
        over_one(net, socket, side, 0);
    left_out(side, 1, why, 1);
}

/* With such a link, the first comm detects it, and later comms do not dial it. */
static void found_once(struct net *net, int socket, char side, const char *why)
{
    long long first = over_one(net, socket, side, 0);
    for (int round = 0; round < 2; round++) {
        long long later = over_one(net, socket, side, 0);
        printf("%c: dialled %lld connections for the first comm, %lld for a later one\n", side, first, later);
        CHECK(later < first);
    }
    left_out(side, 1, why, 1);
}

static void down_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', 2);
    shell("ip link set b1 down");
    for (double since = now(); is_up("b1", AF_INET);)
        again(since, "a link's end");
    both(socket);
    over_the_first(net, socket, 'b', "is down and left out");
}

static void down_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', 2);
    both(socket);
    for (double since = now(); is_up("a1", AF_INET);)
        again(since, "a link's end");
    over_the_first(net, socket, 'a', "is down and left out");
}

static void down_at_start(struct net *net)
{
    two(net, down_there, down_here, 0);
}

/* One or two addresses refuse: the others carry the data, and each one left out is logged once. It is an error if all
 * refuse. */
static void refused_at_start(struct net *net)
{
    enum { ADDRESSES = 46, ADDRESS = 6, PORT = 4 };
    static const int all[3] = { 0, 1, 2 };
    CHECK(unshare(CLONE_NEWNET) == 0);
    shell("ip link set lo up");
    shell("ip link add a0 type veth peer name a1 && ip link add a2 type veth peer name a3");
    of.wires = 4;
    nics_up('a', 3);
    net_open(net, path);
    CHECK(net_init(net, logger) == SUCCESS && net_merge(net, 3, all, &net->device) == SUCCESS);
    for (int refuse = 0; refuse < 4; refuse++) {
        unsigned char handle[128];
        void *listener, *none = NULL, *comm = NULL;
        CHECK(net_listen(net, handle, &listener) == SUCCESS && handle[4] == 3);
        for (int n = 0; n < refuse; n++)
            memcpy(handle + ADDRESSES + n * ADDRESS + PORT, "\1\0", 2);
        if (refuse < 3) {
            struct pair pair = meet(net, listener, (char *)handle, &none);
            message(net, pair, 3 << 20, 3 << 20, 1);
            message(net, pair, 100, 100, 2);
            pair_close(net, pair);
            CHECK(warnings == refuse);
            continue;
        }
        double since = now();
        while (net_connect(net, handle, &comm, &none) == SUCCESS)
            again(since, "a connect to nobody");
        CHECK(comm == NULL && warnings == 3 && strstr(last_warning, "refused"));
        net_close_listen(net, listener);
    }
}

static int asked;

/* Replaces the C library's function, also for the plugin: counts the calls that list all interfaces. */
int getifaddrs(struct ifaddrs **all)
{
    asked++;
    return ((int (*)(struct ifaddrs **))dlsym(RTLD_NEXT, "getifaddrs"))(all);
}

/* Many comms together list the interfaces once a second, instead of each by itself. */
static void asking(struct net *net)
{
    enum { COMMS = 32 };
    CHECK(unshare(CLONE_NEWNET) == 0);
    shell("ip link set lo up");
    shell("ip link add a0 type veth peer name a1");
    nics_up('a', 2);
    load_merged(net, 2);
    asked = 0;
    double since = now();
    for (int n = 0; n < COMMS; n++) {
        struct pair pair = pair_here(net);
        message(net, pair, 100, 100, (unsigned)n);
        pair_close(net, pair);
    }
    printf("asked %d times for %d comms, %.3f s\n", asked, 2 * COMMS, now() - since);
    CHECK(asked >= 1 && asked <= 1 + now() - since);
}

/* To an address without a host: nothing comes back. */
static void nobody_answers(const char *nic, const char *address)
{
    shell("ip neigh replace %s lladdr 02:00:00:00:00:77 dev %s nud permanent", address, nic);
}

static void mute_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', 2);
    nobody_answers("b1", "10.79.1.1");
    both(socket);
    found_once(net, socket, 'b', "no answer from the listener");
}

static void mute_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', 2);
    nobody_answers("a1", "10.79.1.2");
    both(socket);
    found_once(net, socket, 'a', "no answer from the listener");
}

static void mute_at_start(struct net *net)
{
    two(net, mute_there, mute_here, 0);
}

/* No host answers for an address; the kernel gives up and reports that to its own sockets over loopback. */
static void absent(struct net *net, int socket, char side)
{
    shell("ip link set lo up");
    shell("echo 8 > /proc/sys/net/ipv4/conf/%c1/arp_ignore", side);
    both(socket);
    found_once(net, socket, side, "No route to host");
}

static void absent_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', 2);
    absent(net, socket, 'b');
}

static void absent_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', 2);
    absent(net, socket, 'a');
}

static void absent_at_start(struct net *net)
{
    two(net, absent_there, absent_here, 0);
}

/* First one link is dead, then the other. */
static void in_turn(struct net *net, int socket, char side)
{
    char nics[2][16], theirs[2][64];
    for (int wire = 0; wire < 2; wire++) {
        snprintf(nics[wire], sizeof nics[wire], "%c%d", side, wire);
        address(side == 'a' ? 'b' : 'a', wire, theirs[wire], sizeof theirs[wire]);
    }
    nobody_answers(nics[1], theirs[1]);
    both(socket);
    over_one(net, socket, side, 0);
    left_out(side, 1, "no answer from the listener", 1);
    both(socket);
    shell("ip neigh del %s dev %s", theirs[1], nics[1]);
    nobody_answers(nics[0], theirs[0]);
    both(socket);
    over_one(net, socket, side, 1);
    left_out(side, 0, "no answer from the listener", 2);
}

static void turns_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', 2);
    in_turn(net, socket, 'b');
}

static void turns_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', 2);
    in_turn(net, socket, 'a');
}

static void mute_in_turn(struct net *net)
{
    two(net, turns_there, turns_here, 0);
}

/* An endless stream until a NIC dies; both ends get an error that names the NIC. */
static void ends(struct net *net, int socket, char side, void (*begin)(void))
{
    struct pair pair = pair_there(net, socket);
    both(socket);
    CHECK(stream(net, pair, side == 'a', 16) == SUCCESS);
    begin();
    double since = now();
    int result = stream(net, pair, side == 'a', 1 << 30);
    printf("%c: error %d after %.0f s: %s\n", side, result, now() - since, last_warning);
    CHECK(result == REMOTE_ERROR && warnings == 1);
    /* The end that gets the error first closes, and the other end sees that. */
    CHECK(strstr(last_warning, side == 'a' ? "over a" : "over b"));
    pair_close(net, pair);
}

static void nothing(void) {}

static void cut(void)
{
    shell("ip link set b1 down");
}

static void dies_there(struct net *net, int socket)
{
    namespace_there(socket);
    ready(net, socket, 'b', 2);
    ends(net, socket, 'b', cut);
}

static void dies_here(struct net *net, int socket)
{
    namespace_here(socket);
    ready(net, socket, 'a', 2);
    ends(net, socket, 'a', nothing);
}

static void dies_later(struct net *net)
{
    two(net, dies_there, dies_here, 0);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(struct net *);
    } cases[] = {
        { "merging", merging },
        { "two_nics", two_nics },
        { "two_nics_v6", two_nics_v6 },
        { "four_nics", four_nics },
        { "four_nics_v6", four_nics_v6 },
        { "two_and_three", two_and_three },
        { "one_and_two", one_and_two },
        { "unequal_nics", unequal_nics },
        { "down_at_start", down_at_start },
        { "refused_at_start", refused_at_start },
        { "mute_at_start", mute_at_start },
        { "absent_at_start", absent_at_start },
        { "mute_in_turn", mute_in_turn },
        { "asking", asking },
        { "dies_later", dies_later },
    };
    CHECK(count == 4);
    struct net net = { .version = atoi(arguments[2]) };
    path = arguments[1];
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        if (!strcmp(cases[n].name, arguments[3])) {
            cases[n].run(&net);
            puts("passed");
            return 0;
        }
    }
    fprintf(stderr, "no case %s\n", arguments[3]);
    return 1;
}
