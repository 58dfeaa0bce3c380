//go:build ignore

// What becomes of TCP connections that are opened below a cgroup, by
// destination. UAPI only: no vmlinux.h, no CO-RE.
//
// A socket is marked when it sends its SYN. The mark says that a callback is
// about a connection that this program counts: several sockops programs share
// the flags that ask for callbacks, and each gets the other's. What ends a
// connection that was never established shows in turn:
//
//	a segment came in                            refused (RST)
//	the kernel gave up (RTO callback: expired)   timed out
//	the caller closed it, the SYN was repeated   timed out
//	the caller closed it before that             given up
//	none of these                                unreachable (ICMP, no neighbour)

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10

// IPv4 addresses are IPv4-mapped, whichever family the socket has.
struct destination {
	__u32 addr[4]; // network byte order
	__u32 port;
};

struct counts {
	__u64 connects;
	__u64 ok;
	__u64 refused;
	__u64 timed_out;
	__u64 unreachable;
	__u64 given_up;
	__u64 retransmits; // segments, SYNs too
};

// SYN round trips are in microseconds, 0 where there was none yet. Two CPUs may
// write one at a time: the loser's sample is lost.
struct observed {
	struct counts counts;
	__u64 last; // CLOCK_MONOTONIC, nanoseconds
	__u32 rtt_last;
	__u32 rtt_min;
	__u32 rtt_ewma; // a new sample weighs an eighth
	__u32 pad;
};

// How many SYN round trips there were up to a bound: 64 us, and four times as
// much each.
#define BUCKETS 8

struct totals {
	struct counts counts;
	__u64 samples;
	__u64 rtt_sum; // microseconds
	__u64 rtt[BUCKETS];
};

struct mark {
	__u8 open; // neither established nor failed
	__u8 closed;
	__u8 expired;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct destination);
	__type(value, struct observed);
} fp_observed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct totals);
} fp_totals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct mark);
} fp_sockets SEC(".maps");

static __always_inline struct observed *find(const struct destination *d)
{
	struct observed none = {};
	struct observed *o = bpf_map_lookup_elem(&fp_observed, d);

	if (o)
		return o;
	bpf_map_update_elem(&fp_observed, d, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&fp_observed, d);
}

// One CPU too may be in two sockets' callbacks, one of them by interrupt.
#define COUNT(field, n)                                      \
	do {                                                 \
		__sync_fetch_and_add(&o->counts.field, (n)); \
		__sync_fetch_and_add(&t->counts.field, (n)); \
	} while (0)

static __always_inline void round_trip(struct observed *o, struct totals *t, __u32 us)
{
	o->rtt_last = us;
	if (!o->rtt_min || us < o->rtt_min)
		o->rtt_min = us;
	o->rtt_ewma = o->rtt_ewma ? o->rtt_ewma - o->rtt_ewma / 8 + us / 8 : us;
	__sync_fetch_and_add(&t->samples, 1);
	__sync_fetch_and_add(&t->rtt_sum, us);
	// Each at a place of its own: a computed one is refused to who has CAP_BPF
	// without CAP_PERFMON.
#pragma unroll
	for (int i = 0; i < BUCKETS; i++)
		if (us <= 64u << (2 * i))
			__sync_fetch_and_add(&t->rtt[i], 1);
}

SEC("sockops")
int fp_sockops(struct bpf_sock_ops *ctx)
{
	// All at once and first: a field that is read behind a branch may become a
	// load by a computed pointer, which verifiers refuse.
	__u32 op = ctx->op, family = ctx->family;
	__u32 old = ctx->args[0], arg1 = ctx->args[1], expired = ctx->args[2];
	__u32 ip4 = ctx->remote_ip4, port = ctx->remote_port;
	__u32 a0 = ctx->remote_ip6[0], a1 = ctx->remote_ip6[1], a2 = ctx->remote_ip6[2], a3 = ctx->remote_ip6[3];
	__u32 srtt = ctx->srtt_us, repeated = ctx->total_retrans, segs_in = ctx->segs_in, flags = ctx->bpf_sock_ops_cb_flags;
	struct bpf_sock *sk = ctx->sk;
	asm volatile("" ::: "memory");

	__u32 key = 0;
	struct destination d = {};
	struct observed *o;
	struct totals *t;
	struct mark *m;

	switch (op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_RETRANS_CB:
	case BPF_SOCK_OPS_RTO_CB:
	case BPF_SOCK_OPS_STATE_CB:
		break;
	default:
		return 1;
	}
	if (!sk)
		return 1;
	if (family == AF_INET) {
		d.addr[2] = bpf_htonl(0xffff);
		d.addr[3] = ip4;
	} else if (family == AF_INET6) {
		d.addr[0] = a0;
		d.addr[1] = a1;
		d.addr[2] = a2;
		d.addr[3] = a3;
	} else {
		return 1;
	}
	d.port = bpf_ntohl(port);

	if (op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		// Loopback leads nowhere: no path has its cost.
		if (!d.addr[0] && !d.addr[1]) {
			if (d.addr[2] == bpf_htonl(0xffff) && (bpf_ntohl(d.addr[3]) >> 24) == 127)
				return 1;
			if (!d.addr[2] && d.addr[3] == bpf_htonl(1))
				return 1;
		}
		m = bpf_sk_storage_get(&fp_sockets, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (!m)
			return 1;
		// The socket may have been connected before.
		m->open = 1;
		m->closed = 0;
		m->expired = 0;
		bpf_sock_ops_cb_flags_set(ctx, flags | BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG);
	} else {
		m = bpf_sk_storage_get(&fp_sockets, sk, 0, 0);
		if (!m)
			return 1;
	}

	if (op == BPF_SOCK_OPS_RTO_CB) {
		if (expired)
			m->expired = 1;
		return 1;
	}
	if (op == BPF_SOCK_OPS_STATE_CB && (!m->open || arg1 != BPF_TCP_CLOSE))
		return 1;

	o = find(&d);
	t = bpf_map_lookup_elem(&fp_totals, &key);
	if (!o || !t)
		return 1;
	o->last = bpf_ktime_get_ns();
	switch (op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		COUNT(connects, 1);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		m->open = 0;
		COUNT(ok, 1);
		// None where the SYN was repeated, without timestamps.
		if (srtt >> 3)
			round_trip(o, t, srtt >> 3);
		break;
	case BPF_SOCK_OPS_RETRANS_CB:
		COUNT(retransmits, arg1);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		m->open = 0;
		if (old != BPF_TCP_SYN_SENT)
			break;
		if (segs_in)
			COUNT(refused, 1);
		else if (m->expired || (m->closed && repeated))
			COUNT(timed_out, 1);
		else if (m->closed)
			COUNT(given_up, 1);
		else
			COUNT(unreachable, 1);
		break;
	}
	return 1;
}

// The caller closes: what follows in the socket's states is its doing.
SEC("cgroup/sock_release")
int fp_release(struct bpf_sock *ctx)
{
	struct mark *m = bpf_sk_storage_get(&fp_sockets, ctx, 0, 0);

	if (m && m->open)
		m->closed = 1;
	return 1;
}

char LICENSE[] SEC("license") = "Apache-2.0";
