// SPDX-License-Identifier: GPL-2.0
/*
 * dmnic: a wired pair of software NICs, dm0 and dm1, for testing devmem TCP
 * without hardware.
 *
 * Each has NQ queues, header split, ntuple rules on TCP connections, an RSS table,
 * page pools that accept memory providers (devmem RX) and netmem TX. "DMA" is a
 * memcpy through the kernel's direct map, so the memory behind a dmabuf must be
 * ordinary RAM (udmabuf, system heap). A TX super-frame is cut into MSS-sized
 * packets, as TSO does; GRO merges them again on RX.
 *
 * Not a real driver: no hardware GRO, no large buffers.
 */
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <net/ip.h>
#include <net/tcp.h>
#include <net/netdev_queues.h>
#include <net/netdev_rx_queue.h>
#include <net/page_pool/helpers.h>
#include <net/netdev_lock.h>

#define NQ 4
#define NRULE 64
#define NINDIR 64
#define MAX_BACKLOG 8192

/* Fault knobs, writable at run time in /sys/module/dmnic/parameters. */
static int split_linear;
module_param(split_linear, int, 0644);
MODULE_PARM_DESC(split_linear, "first N payload bytes of each packet go to the linear area");
static int drop_every;
module_param(drop_every, int, 0644);
MODULE_PARM_DESC(drop_every, "drop every Nth data packet of a queue (0: none)");
static int swallow;
module_param(swallow, int, 0644);
MODULE_PARM_DESC(swallow, "1: data packets that a rule names are lost");
static int pack = 1;
module_param(pack, int, 0644);
MODULE_PARM_DESC(pack, "1: several packets share a page; 0: a page per fragment");
static int fixed_places;
module_param(fixed_places, int, 0644);
MODULE_PARM_DESC(fixed_places, "1: who adds a rule has to say where, as with some drivers");
/* Set further down, where the queues are known. */
static unsigned int hold;

/*
 * An RX queue; the peer's transmit path is its wire. It is polled on one CPU, like a queue
 * whose interrupt has an affinity. The CPU that received a packet frees it when another CPU
 * has read it, but only once it receives again. If the next packets were received on another
 * CPU, a small pool would stay dry.
 */
struct rq {
	struct napi_struct napi;
	call_single_data_t interrupt;
	unsigned long is_called;
	int cpu;
	struct page_pool *pp;
	struct sk_buff_head q;
	int idx;
	struct net_device *dev;
	u64 pkts, alloc_fail, devmem_pkts, linear_only, seen;
	bool on;
};

struct dm {
	struct net_device *dev;
	struct dm *peer;
	struct platform_device *pdev;
	struct rq rq[NQ];
	struct {
		bool used;
		struct ethtool_rx_flow_spec fs;
	} rule[NRULE];
	u32 indir[NINDIR];
	u64 tx_pkts, tx_netmem;
};

static struct dm *devs[2];

static int mkpool(struct dm *d, int idx, struct page_pool **out)
{
	struct page_pool_params p = {.order = 0,
				     .pool_size = 1024,
				     .nid = NUMA_NO_NODE,
				     .dev = &d->pdev->dev,
				     .napi = &d->rq[idx].napi,
				     .dma_dir = DMA_FROM_DEVICE,
				     .max_len = PAGE_SIZE,
				     .netdev = d->dev,
				     .queue_idx = idx,
				     .flags = PP_FLAG_DMA_MAP | PP_FLAG_DMA_SYNC_DEV |
					      PP_FLAG_ALLOW_UNREADABLE_NETMEM};
	struct page_pool *pp = page_pool_create(&p);
	if (IS_ERR(pp))
		return PTR_ERR(pp);
	*out = pp;
	return 0;
}

/* Read bytes [off, off + len) of a TX skb, whatever memory they live in. */
static void tx_read(const struct sk_buff *skb, int off, void *dst, int len)
{
	int i, hl = skb_headlen(skb);
	if (off < hl) {
		int n = min(len, hl - off);
		memcpy(dst, skb->data + off, n);
		dst += n;
		off += n;
		len -= n;
	}
	off -= hl;
	for (i = 0; len && i < skb_shinfo(skb)->nr_frags; i++) {
		const skb_frag_t *f = &skb_shinfo(skb)->frags[i];
		int fs = skb_frag_size(f), n;
		void *src;
		if (off >= fs) {
			off -= fs;
			continue;
		}
		n = min(len, fs - off);
		if (netmem_is_net_iov(skb_frag_netmem(f)))
			src = phys_to_virt(netmem_get_dma_addr(skb_frag_netmem(f)) +
					   skb_frag_off(f) + off);
		else
			src = page_address(skb_frag_page(f)) + skb_frag_off(f) + off;
		memcpy(dst, src, n);
		dst += n;
		len -= n;
		off = 0;
	}
}

/*
 * Receive one packet: hlen header bytes, then plen payload bytes at poff of the TX
 * skb. seqadd and segidx place a TSO segment in its super-frame.
 */
static void rx_one(struct rq *r, struct sk_buff *tx, int hlen, int poff, int plen, u32 seqadd,
		   bool last, int ipoff, bool v6, bool tcp, int segidx)
{
	struct sk_buff *skb;
	int lin = tcp ? hlen : tx->len, done = 0, i = 0;
	bool unread = r->pp && r->pp->mp_ops;
	if (tcp && split_linear) {
		int n = min(split_linear, plen);
		lin += n;
		done = n;
	}
	skb = napi_alloc_skb(&r->napi, lin);
	if (!skb)
		return;
	tx_read(tx, 0, skb_put(skb, tcp ? hlen : tx->len), tcp ? hlen : tx->len);
	if (tcp) {
		struct tcphdr *th;
		int thoff;
		if (v6) {
			struct ipv6hdr *h = (void *)(skb->data + ipoff);
			h->payload_len = htons(hlen - ipoff - sizeof(*h) + plen);
			thoff = ipoff + sizeof(*h);
		} else {
			struct iphdr *h = (void *)(skb->data + ipoff);
			h->tot_len = htons(hlen - ipoff + plen);
			h->id = htons(ntohs(h->id) + segidx);
			ip_send_check(h);
			thoff = ipoff + h->ihl * 4;
		}
		th = (void *)(skb->data + thoff);
		th->seq = htonl(ntohl(th->seq) + seqadd);
		if (!last) {
			th->fin = 0;
			th->psh = 0;
		}
		if (done)
			tx_read(tx, poff, skb_put(skb, done), done);
		while (done < plen) {
			unsigned int off = 0, sz = min_t(int, plen - done, PAGE_SIZE), want = sz;
			netmem_ref nm;
			if (pack)
				nm = page_pool_alloc_frag_netmem(r->pp, &off, ALIGN(sz, 64),
								 GFP_ATOMIC | __GFP_NOWARN);
			else
				nm = page_pool_dev_alloc_netmems(r->pp);
			if (!nm) {
				r->alloc_fail++;
				if (i)
					skb_mark_for_recycle(skb);
				kfree_skb(skb);
				return;
			}
			tx_read(tx, poff + done, phys_to_virt(netmem_get_dma_addr(nm) + off), want);
			skb_add_rx_frag_netmem(skb, i++, nm, off, want,
					       pack ? ALIGN(want, 64) : PAGE_SIZE);
			done += want;
		}
		if (i) {
			skb_mark_for_recycle(skb);
			if (unread)
				r->devmem_pkts++;
		} else if (plen)
			r->linear_only++;
	}
	r->pkts++;
	skb->protocol = eth_type_trans(skb, r->dev);
	skb->ip_summed = CHECKSUM_UNNECESSARY;
	skb_record_rx_queue(skb, r->idx);
	napi_gro_receive(&r->napi, skb);
}

/* Cut a TX skb into packets and receive each. */
static void rx_skb(struct rq *r, struct sk_buff *tx)
{
	int l2 = ETH_HLEN, hlen = tx->len, plen, mss, off, k = 0;
	bool v6 = false, tcp = false;
	u16 proto = ntohs(eth_hdr(tx)->h_proto);
	if (proto == ETH_P_IP && ip_hdr(tx)->protocol == IPPROTO_TCP) {
		tcp = true;
		hlen = l2 + ip_hdr(tx)->ihl * 4 + tcp_hdr(tx)->doff * 4;
	} else if (proto == ETH_P_IPV6 && ipv6_hdr(tx)->nexthdr == IPPROTO_TCP) {
		tcp = v6 = true;
		hlen = l2 + sizeof(struct ipv6hdr) + tcp_hdr(tx)->doff * 4;
	}
	plen = tx->len - hlen;
	if (!tcp || !plen) {
		rx_one(r, tx, hlen, hlen, 0, 0, true, l2, v6, tcp, 0);
		return;
	}
	mss = skb_shinfo(tx)->gso_size ?: plen;
	for (off = 0; off < plen; off += mss, k++) {
		int n = min(mss, plen - off);
		if (drop_every && ++r->seen % drop_every == 0)
			continue;
		rx_one(r, tx, hlen, hlen + off, n, off, off + n == plen, l2, v6, true, k);
	}
}

static void on_interrupt(void *data)
{
	struct rq *r = data;

	/* A packet that comes later makes a call of its own; this poll finds all earlier ones. */
	clear_bit(0, &r->is_called);
	smp_mb__after_atomic();
	napi_schedule_irqoff(&r->napi);
}

/* Called with bottom halves off, on any CPU: the bit lets one of them make the call. */
static void interrupt(struct rq *r)
{
	if (r->cpu == smp_processor_id()) {
		napi_schedule(&r->napi);
	} else if (!test_and_set_bit(0, &r->is_called) &&
		   smp_call_function_single_async(r->cpu, &r->interrupt)) {
		/* That CPU is off. */
		clear_bit(0, &r->is_called);
		napi_schedule(&r->napi);
	}
}

static int dm_poll(struct napi_struct *napi, int budget)
{
	struct rq *r = container_of(napi, struct rq, napi);
	int n = 0;
	struct sk_buff *s;
	if (READ_ONCE(hold) & BIT(r->idx)) {
		napi_complete_done(napi, 0);
		return 0;
	}
	while (n < budget && (s = skb_dequeue(&r->q))) {
		rx_skb(r, s);
		napi_consume_skb(s, budget);
		n++;
	}
	if (n < budget && napi_complete_done(napi, n) && !skb_queue_empty(&r->q))
		napi_schedule(napi);
	return n;
}

/* Whatever waits in queues that are not held any more goes on. */
static int set_hold(const char *value, const struct kernel_param *kp)
{
	int e = param_set_uint(value, kp), i, q;

	for (i = 0; i < 2; i++)
		for (q = 0; devs[i] && q < NQ; q++) {
			struct rq *r = &devs[i]->rq[q];

			local_bh_disable();
			if (READ_ONCE(r->on))
				interrupt(r);
			local_bh_enable();
		}
	return e;
}

static const struct kernel_param_ops hold_ops = {.set = set_hold, .get = param_get_uint};
module_param_cb(hold, &hold_ops, &hold, 0644);
MODULE_PARM_DESC(hold, "queues, a bit each, whose packets wait, unread, with the sender's NIC");

static bool is_tcp(const struct sk_buff *skb)
{
	u16 proto = ntohs(eth_hdr(skb)->h_proto);

	return (proto == ETH_P_IP && ip_hdr(skb)->protocol == IPPROTO_TCP) ||
	       (proto == ETH_P_IPV6 && ipv6_hdr(skb)->nexthdr == IPPROTO_TCP);
}

static bool words_match(const __be32 *is, const __be32 *wanted, const __be32 *mask, int n)
{
	while (n--)
		if ((is[n] ^ wanted[n]) & mask[n])
			return false;
	return true;
}

static bool ports_match(const struct tcphdr *th, __be16 psrc, __be16 psrc_mask, __be16 pdst,
			__be16 pdst_mask)
{
	return !((th->source ^ psrc) & psrc_mask) && !((th->dest ^ pdst) & pdst_mask);
}

/* Whether a TCP packet is one that a rule names: addresses and ports under their masks. */
static bool rule_matches(const struct ethtool_rx_flow_spec *fs, const struct sk_buff *skb)
{
	u32 type = fs->flow_type & ~(FLOW_EXT | FLOW_RSS | FLOW_MAC_EXT);

	if (type == TCP_V4_FLOW && eth_hdr(skb)->h_proto == htons(ETH_P_IP)) {
		const struct ethtool_tcpip4_spec *h = &fs->h_u.tcp_ip4_spec;
		const struct ethtool_tcpip4_spec *m = &fs->m_u.tcp_ip4_spec;

		return words_match(&ip_hdr(skb)->saddr, &h->ip4src, &m->ip4src, 1) &&
		       words_match(&ip_hdr(skb)->daddr, &h->ip4dst, &m->ip4dst, 1) &&
		       ports_match(tcp_hdr(skb), h->psrc, m->psrc, h->pdst, m->pdst);
	}
	if (type == TCP_V6_FLOW && eth_hdr(skb)->h_proto == htons(ETH_P_IPV6)) {
		const struct ethtool_tcpip6_spec *h = &fs->h_u.tcp_ip6_spec;
		const struct ethtool_tcpip6_spec *m = &fs->m_u.tcp_ip6_spec;

		return words_match(ipv6_hdr(skb)->saddr.s6_addr32, h->ip6src, m->ip6src, 4) &&
		       words_match(ipv6_hdr(skb)->daddr.s6_addr32, h->ip6dst, m->ip6dst, 4) &&
		       ports_match(tcp_hdr(skb), h->psrc, m->psrc, h->pdst, m->pdst);
	}
	return false;
}

/* The receiver's queue: the first ntuple rule that matches, else RSS; NQ for what is swallowed. */
static int pick_queue(const struct dm *p, struct sk_buff *skb)
{
	int i;

	for (i = 0; i < NRULE && skb_transport_header_was_set(skb) && is_tcp(skb); i++)
		if (p->rule[i].used && rule_matches(&p->rule[i].fs, skb))
			return swallow && skb->len > skb_tcp_all_headers(skb) ?
			       NQ : p->rule[i].fs.ring_cookie;
	return p->indir[skb_get_hash(skb) % NINDIR];
}

static netdev_tx_t dm_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct dm *d = netdev_priv(dev), *p = READ_ONCE(d->peer);
	struct rq *r;
	int q;

	if (!p || !netif_running(p->dev))
		goto drop;
	if (skb_cow_head(skb, 0))
		goto drop;
	skb_reset_mac_header(skb);
	d->tx_pkts++;
	if (!skb_frags_readable(skb))
		d->tx_netmem++;
	q = pick_queue(p, skb);
	if (q == NQ)
		goto drop;
	r = &p->rq[q % NQ];
	if (!READ_ONCE(r->on) || skb_queue_len(&r->q) > MAX_BACKLOG)
		goto drop;
	skb_queue_tail(&r->q, skb);
	interrupt(r);
	return NETDEV_TX_OK;
drop:
	dev_core_stats_tx_dropped_inc(dev);
	kfree_skb(skb);
	return NETDEV_TX_OK;
}

static int dm_open(struct net_device *dev)
{
	struct dm *d = netdev_priv(dev);
	int i, e;
	for (i = 0; i < NQ; i++) {
		if (!d->rq[i].pp) {
			e = mkpool(d, i, &d->rq[i].pp);
			if (e)
				return e;
		}
		napi_enable_locked(&d->rq[i].napi);
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, &d->rq[i].napi);
		WRITE_ONCE(d->rq[i].on, true);
	}
	netif_tx_start_all_queues(dev);
	netif_carrier_on(dev);
	return 0;
}

static int dm_stop(struct net_device *dev)
{
	struct dm *d = netdev_priv(dev);
	int i;
	netif_carrier_off(dev);
	netif_tx_disable(dev);
	for (i = 0; i < NQ; i++) {
		WRITE_ONCE(d->rq[i].on, false);
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, NULL);
		napi_disable_locked(&d->rq[i].napi);
		skb_queue_purge(&d->rq[i].q);
		page_pool_destroy(d->rq[i].pp);
		d->rq[i].pp = NULL;
	}
	return 0;
}

/* As most drivers do: without ntuple there are no rules. */
static int dm_set_features(struct net_device *dev, netdev_features_t features)
{
	struct dm *d = netdev_priv(dev);
	int i;

	for (i = 0; i < NRULE && !(features & NETIF_F_NTUPLE); i++)
		d->rule[i].used = false;
	return 0;
}

static const struct net_device_ops dm_ops = {.ndo_open = dm_open,
					     .ndo_set_features = dm_set_features,
					     .ndo_stop = dm_stop,
					     .ndo_start_xmit = dm_xmit,
					     .ndo_set_mac_address = eth_mac_addr};

/* Queue restart with another memory provider: what BIND_RX and unbind call. */
struct qm {
	struct page_pool *pp;
};

static int qm_alloc(struct net_device *dev, struct netdev_queue_config *c, void *m, int idx)
{
	struct qm *q = m;
	if (!netif_running(dev))
		return -ENETDOWN;
	return mkpool(netdev_priv(dev), idx, &q->pp);
}

static void qm_free(struct net_device *dev, void *m)
{
	struct qm *q = m;
	page_pool_destroy(q->pp);
}

static int qm_start(struct net_device *dev, struct netdev_queue_config *c, void *m, int idx)
{
	struct qm *q = m;
	struct dm *d = netdev_priv(dev);
	d->rq[idx].pp = q->pp;
	napi_enable_locked(&d->rq[idx].napi);
	WRITE_ONCE(d->rq[idx].on, true);
	return 0;
}

static int qm_stop(struct net_device *dev, void *m, int idx)
{
	struct qm *q = m;
	struct dm *d = netdev_priv(dev);
	WRITE_ONCE(d->rq[idx].on, false);
	synchronize_net();
	napi_disable_locked(&d->rq[idx].napi);
	skb_queue_purge(&d->rq[idx].q);
	q->pp = d->rq[idx].pp;
	d->rq[idx].pp = NULL;
	page_pool_disable_direct_recycling(q->pp);
	return 0;
}

static struct device *qm_dma(struct net_device *dev, int idx)
{
	struct dm *d = netdev_priv(dev);
	return &d->pdev->dev;
}

static const struct netdev_queue_mgmt_ops dm_qops = {.ndo_queue_mem_size = sizeof(struct qm),
						     .ndo_queue_mem_alloc = qm_alloc,
						     .ndo_queue_mem_free = qm_free,
						     .ndo_queue_start = qm_start,
						     .ndo_queue_stop = qm_stop,
						     .ndo_queue_get_dma_dev = qm_dma};

static void dm_get_ring(struct net_device *dev, struct ethtool_ringparam *r,
			struct kernel_ethtool_ringparam *k, struct netlink_ext_ack *e)
{
	r->rx_max_pending = r->rx_pending = r->tx_max_pending = r->tx_pending = 1024;
	k->hds_thresh_max = 4096;
	if (dev->cfg->hds_config == ETHTOOL_TCP_DATA_SPLIT_UNKNOWN)
		k->tcp_data_split = ETHTOOL_TCP_DATA_SPLIT_ENABLED;
}

static int dm_set_ring(struct net_device *dev, struct ethtool_ringparam *r,
		       struct kernel_ethtool_ringparam *k, struct netlink_ext_ack *e)
{
	return 0;
}

static void dm_get_ch(struct net_device *dev, struct ethtool_channels *c)
{
	c->max_combined = c->combined_count = NQ;
}

static u32 dm_nring(struct net_device *dev)
{
	return NQ;
}

static int dm_get_nfc(struct net_device *dev, struct ethtool_rxnfc *c, u32 *locs)
{
	struct dm *d = netdev_priv(dev);
	int i, n = 0;
	switch (c->cmd) {
	case ETHTOOL_GRXRINGS:
		c->data = NQ;
		return 0;
	case ETHTOOL_GRXCLSRLCNT:
		for (i = 0; i < NRULE; i++)
			n += d->rule[i].used;
		c->rule_cnt = n;
		c->data = NRULE | (fixed_places ? 0 : RX_CLS_LOC_SPECIAL);
		return 0;
	case ETHTOOL_GRXCLSRULE:
		if (c->fs.location >= NRULE || !d->rule[c->fs.location].used)
			return -ENOENT;
		c->fs = d->rule[c->fs.location].fs;
		return 0;
	case ETHTOOL_GRXCLSRLALL:
		for (i = 0; i < NRULE; i++) {
			if (!d->rule[i].used)
				continue;
			if (n == c->rule_cnt)
				return -EMSGSIZE;
			locs[n++] = i;
		}
		c->rule_cnt = n;
		c->data = NRULE;
		return 0;
	}
	return -EOPNOTSUPP;
}

static int dm_set_nfc(struct net_device *dev, struct ethtool_rxnfc *c)
{
	struct dm *d = netdev_priv(dev);
	u32 l = c->fs.location;
	int i;
	if (c->cmd == ETHTOOL_SRXCLSRLINS) {
		u32 ft = c->fs.flow_type & ~(FLOW_EXT | FLOW_RSS | FLOW_MAC_EXT);
		if (!(dev->features & NETIF_F_NTUPLE))
			return -EOPNOTSUPP;
		if (ft != TCP_V4_FLOW && ft != TCP_V6_FLOW)
			return -EOPNOTSUPP;
		if (c->fs.ring_cookie >= NQ)
			return -EINVAL;
		if ((l & RX_CLS_LOC_SPECIAL) && !fixed_places) {
			for (i = 0; i < NRULE && d->rule[i].used; i++)
				;
			l = i;
		}
		if (l >= NRULE)
			return -ENOSPC;
		c->fs.location = l;
		d->rule[l].fs = c->fs;
		d->rule[l].used = true;
		return 0;
	}
	if (c->cmd == ETHTOOL_SRXCLSRLDEL) {
		if (l >= NRULE || !d->rule[l].used)
			return -ENOENT;
		d->rule[l].used = false;
		return 0;
	}
	return -EOPNOTSUPP;
}

static u32 dm_indir_sz(struct net_device *dev)
{
	return NINDIR;
}

static int dm_get_rxfh(struct net_device *dev, struct ethtool_rxfh_param *p)
{
	struct dm *d = netdev_priv(dev);
	p->hfunc = ETH_RSS_HASH_TOP;
	if (p->indir)
		memcpy(p->indir, d->indir, sizeof(d->indir));
	return 0;
}

static int dm_set_rxfh(struct net_device *dev, struct ethtool_rxfh_param *p,
		       struct netlink_ext_ack *e)
{
	struct dm *d = netdev_priv(dev);
	if (p->indir)
		memcpy(d->indir, p->indir, sizeof(d->indir));
	return 0;
}

static int dm_sset(struct net_device *dev, int s)
{
	return s == ETH_SS_STATS ? 2 + NQ * 4 : -EOPNOTSUPP;
}

static void dm_strings(struct net_device *dev, u32 s, u8 *b)
{
	int i;
	if (s != ETH_SS_STATS)
		return;
	ethtool_puts(&b, "tx_pkts");
	ethtool_puts(&b, "tx_netmem_pkts");
	for (i = 0; i < NQ; i++) {
		ethtool_sprintf(&b, "rx%d_pkts", i);
		ethtool_sprintf(&b, "rx%d_devmem_pkts", i);
		ethtool_sprintf(&b, "rx%d_alloc_fail", i);
		ethtool_sprintf(&b, "rx%d_linear_only", i);
	}
}

static void dm_stats(struct net_device *dev, struct ethtool_stats *s, u64 *v)
{
	struct dm *d = netdev_priv(dev);
	int i;
	*v++ = d->tx_pkts;
	*v++ = d->tx_netmem;
	for (i = 0; i < NQ; i++) {
		*v++ = d->rq[i].pkts;
		*v++ = d->rq[i].devmem_pkts;
		*v++ = d->rq[i].alloc_fail;
		*v++ = d->rq[i].linear_only;
	}
}

static const struct ethtool_ops dm_eth = {.supported_ring_params = ETHTOOL_RING_USE_TCP_DATA_SPLIT |
								   ETHTOOL_RING_USE_HDS_THRS,
					  .get_ringparam = dm_get_ring,
					  .set_ringparam = dm_set_ring,
					  .get_channels = dm_get_ch,
					  .get_rx_ring_count = dm_nring,
					  .get_rxnfc = dm_get_nfc,
					  .set_rxnfc = dm_set_nfc,
					  .get_rxfh_indir_size = dm_indir_sz,
					  .get_rxfh = dm_get_rxfh,
					  .set_rxfh = dm_set_rxfh,
					  .get_sset_count = dm_sset,
					  .get_strings = dm_strings,
					  .get_ethtool_stats = dm_stats,
					  .get_link = ethtool_op_get_link};

static int make_nic(int i)
{
	struct net_device *dev;
	struct dm *d;
	int k, e;
	struct platform_device *pd = platform_device_alloc("dmnic", i);
	if (!pd)
		return -ENOMEM;
	pd->dev.dma_mask = &pd->platform_dma_mask;
	pd->dev.coherent_dma_mask = DMA_BIT_MASK(64);
	pd->platform_dma_mask = DMA_BIT_MASK(64);
	e = platform_device_add(pd);
	if (e) {
		platform_device_put(pd);
		return e;
	}
	dma_set_mask_and_coherent(&pd->dev, DMA_BIT_MASK(64));
	dev = alloc_etherdev_mqs(sizeof(*d), NQ, NQ);
	if (!dev) {
		platform_device_unregister(pd);
		return -ENOMEM;
	}
	d = netdev_priv(dev);
	d->dev = dev;
	d->pdev = pd;
	SET_NETDEV_DEV(dev, &pd->dev);
	snprintf(dev->name, IFNAMSIZ, "dm%d", i);
	eth_hw_addr_random(dev);
	dev->netdev_ops = &dm_ops;
	dev->ethtool_ops = &dm_eth;
	dev->queue_mgmt_ops = &dm_qops;
	dev->netmem_tx = NETMEM_TX_DMA;
	dev->features = dev->hw_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_TSO |
					   NETIF_F_TSO6 | NETIF_F_HIGHDMA | NETIF_F_RXCSUM |
					   NETIF_F_GRO | NETIF_F_NTUPLE | NETIF_F_RXHASH;
	dev->max_mtu = 65535 - ETH_HLEN;
	dev->cfg->hds_config = ETHTOOL_TCP_DATA_SPLIT_UNKNOWN;
	for (k = 0; k < NQ; k++) {
		d->rq[k].idx = k;
		d->rq[k].dev = dev;
		d->rq[k].cpu = cpumask_local_spread(k, NUMA_NO_NODE);
		INIT_CSD(&d->rq[k].interrupt, on_interrupt, &d->rq[k]);
		skb_queue_head_init(&d->rq[k].q);
		netif_napi_add(dev, &d->rq[k].napi, dm_poll);
	}
	memset(d->indir, 0, sizeof(d->indir)); /* RSS: everything to queue 0 */
	e = register_netdev(dev);
	if (e) {
		free_netdev(dev);
		platform_device_unregister(pd);
		return e;
	}
	devs[i] = d;
	return 0;
}

static void remove_nic(int i)
{
	struct dm *d = devs[i];
	struct platform_device *pd;
	if (!d)
		return;
	pd = d->pdev;
	unregister_netdev(d->dev);
	free_netdev(d->dev);
	platform_device_unregister(pd);
	devs[i] = NULL;
}

static int __init dm_init(void)
{
	int e = make_nic(0);
	if (!e)
		e = make_nic(1);
	if (e) {
		remove_nic(0);
		return e;
	}
	devs[0]->peer = devs[1];
	devs[1]->peer = devs[0];
	return 0;
}

static void __exit dm_exit(void)
{
	if (devs[0])
		devs[0]->peer = NULL;
	if (devs[1])
		devs[1]->peer = NULL;
	synchronize_net();
	remove_nic(0);
	remove_nic(1);
}
module_init(dm_init);
module_exit(dm_exit);
MODULE_LICENSE("GPL");
MODULE_IMPORT_NS("NETDEV_INTERNAL");
MODULE_DESCRIPTION("software NIC pair for devmem TCP tests");
