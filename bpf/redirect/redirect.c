//go:build ignore

// Which connections go to the sidecar of their pod, and by what address. See the
// package's documentation. UAPI alone: no type of the kernel's is looked into.

#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif
#define AF_INET6 10
#define SOCK_STREAM 1
#define GO 1 // the only verdict: nothing is ever refused

// The layout of the pinned maps. What changes its meaning and not its size needs
// another name. Addresses and ports are in network order, IPv4 is v4-mapped.
struct destination {
	__u32 addr[4];
	__u16 port;
	__u16 zero;
};

struct number {
	struct destination destination;
	__u32 zero;
	__u64 retired; // ns since boot; 0: in use
};

struct { // netns cookie -> uid whose connections stay as they are
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} pods SEC(".maps");

struct { // destination -> loopback address
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct destination);
	__type(value, __u32);
} destinations SEC(".maps");

struct { // loopback address -> destination, also of those that are no more
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct number);
} numbers SEC(".maps");

struct { // the number that is given next, and which series it is of, for the agent
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} cursor SEC(".maps");

// What became of connections of chosen pods to chosen destinations.
enum outcome {
	REDIRECTED4,
	REDIRECTED6,
	EXEMPT,
	NO_LISTENER,
	BOUND_DEVICE,
	IPV6_ALONE,
	OUTCOMES,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

// The port of the sidecar's listener, in host order.
const volatile __u16 capture_port = 15002;

static __always_inline void count(__u32 outcome)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &outcome);
	if (n)
		*n += 1;
}

static __always_inline int is_tcp(struct bpf_sock_addr *ctx)
{
	__u32 protocol = ctx->protocol;
	return ctx->type == SOCK_STREAM && (protocol == IPPROTO_TCP || protocol == IPPROTO_MPTCP);
}

// Somebody listens where the connection would go, else it goes its own way.
static __always_inline int listens(struct bpf_sock_addr *ctx)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	int listen;

	tuple.ipv4.daddr = bpf_htonl(0x7f000001);
	tuple.ipv4.dport = bpf_htons(capture_port);
	sk = bpf_sk_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	listen = sk->state == BPF_TCP_LISTEN;
	bpf_sk_release(sk);
	return listen;
}

// The loopback address to which a connection goes instead, 0 for none.
static __always_inline __u32 instead(struct bpf_sock_addr *ctx, struct destination *to)
{
	struct bpf_sock *sk = ctx->sk;
	__u64 cookie = bpf_get_netns_cookie(ctx);
	__u32 *exempt, *address;

	exempt = bpf_map_lookup_elem(&pods, &cookie);
	if (!exempt)
		return 0;
	address = bpf_map_lookup_elem(&destinations, to);
	if (!address)
		return 0;
	if ((__u32)bpf_get_current_uid_gid() == *exempt) {
		count(EXEMPT);
		return 0;
	}
	if (!sk || sk->bound_dev_if) { // loopback cannot be reached by another link
		count(BOUND_DEVICE);
		return 0;
	}
	if (!listens(ctx)) {
		count(NO_LISTENER);
		return 0;
	}
	return *address;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct destination to = {};
	__u32 address;

	if (!is_tcp(ctx))
		return GO;
	to.addr[2] = bpf_htonl(0xffff);
	to.addr[3] = ctx->user_ip4;
	to.port = (__u16)ctx->user_port;
	address = instead(ctx, &to);
	if (address) {
		ctx->user_ip4 = address;
		ctx->user_port = bpf_htons(capture_port);
		count(REDIRECTED4);
	}
	return GO;
}

// A socket that was bound to loopback (by speaks4, for a connection that it had
// before) could reach nothing else. Its source is the kernel's to choose again.
static __always_inline void unbind6(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct sockaddr_in6_ {
		__u16 family, port;
		__u32 flow, addr[4], scope;
	} any = {.family = AF_INET6};
	__u32 s0, s1, s2, s3;

	if (!sk)
		return;
	s0 = sk->src_ip6[0];
	s1 = sk->src_ip6[1];
	s2 = sk->src_ip6[2];
	s3 = sk->src_ip6[3];
	if (s0 == 0 && s1 == 0 && s2 == bpf_htonl(0xffff) && s3 == bpf_htonl(0x7f000001))
		bpf_bind(ctx, (struct sockaddr *)&any, sizeof(any));
}

// A socket that may speak IPv6 alone (IPV6_V6ONLY) cannot go to an address of
// IPv4. The kernel says so when it is bound to one, which is done without a port,
// to the source that the connection has anyway. Nor can one that is bound already.
static __always_inline int speaks4(struct bpf_sock_addr *ctx)
{
	struct sockaddr_in6_ {
		__u16 family, port;
		__u32 flow, addr[4], scope;
	} here = {.family = AF_INET6};

	here.addr[2] = bpf_htonl(0xffff);
	here.addr[3] = bpf_htonl(0x7f000001);
	return bpf_bind(ctx, (struct sockaddr *)&here, sizeof(here)) == 0;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct destination to = {};
	__u32 a0 = ctx->user_ip6[0], a1 = ctx->user_ip6[1], a2 = ctx->user_ip6[2], a3 = ctx->user_ip6[3];
	__u32 address;
	int mapped;

	if (!is_tcp(ctx))
		return GO;
	mapped = a0 == 0 && a1 == 0 && a2 == bpf_htonl(0xffff);
	to.addr[0] = a0;
	to.addr[1] = a1;
	to.addr[2] = a2;
	to.addr[3] = a3;
	to.port = (__u16)ctx->user_port;
	address = instead(ctx, &to);
	if (address && !mapped && !speaks4(ctx)) {
		count(IPV6_ALONE);
		address = 0;
	}
	if (!address) {
		if (!mapped || (bpf_ntohl(a3) >> 24) != 127)
			unbind6(ctx);
		return GO;
	}
	ctx->user_ip6[0] = 0;
	ctx->user_ip6[1] = 0;
	ctx->user_ip6[2] = bpf_htonl(0xffff);
	ctx->user_ip6[3] = address;
	ctx->user_port = bpf_htons(capture_port);
	count(REDIRECTED6);
	return GO;
}

// The destination behind the peer that the kernel has, if that is one of ours:
// a socket that has gone elsewhere since has another.
static __always_inline struct number *behind(struct bpf_sock_addr *ctx, __u32 address, __u16 port)
{
	if (port != bpf_htons(capture_port) || (bpf_ntohl(address) >> 24) != 127 || !is_tcp(ctx))
		return 0;
	return bpf_map_lookup_elem(&numbers, &address);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct number *n = behind(ctx, ctx->user_ip4, (__u16)ctx->user_port);

	if (n) {
		ctx->user_ip4 = n->destination.addr[3];
		ctx->user_port = n->destination.port;
	}
	return GO;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	__u32 a0 = ctx->user_ip6[0], a1 = ctx->user_ip6[1], a2 = ctx->user_ip6[2], a3 = ctx->user_ip6[3];
	struct number *n;

	if (a0 != 0 || a1 != 0 || a2 != bpf_htonl(0xffff))
		return GO;
	n = behind(ctx, a3, (__u16)ctx->user_port);
	if (n) {
		ctx->user_ip6[0] = n->destination.addr[0];
		ctx->user_ip6[1] = n->destination.addr[1];
		ctx->user_ip6[2] = n->destination.addr[2];
		ctx->user_ip6[3] = n->destination.addr[3];
		ctx->user_port = n->destination.port;
	}
	return GO;
}

// Helpers of the kernel's that are its own license's alone are not called.
char _license[] SEC("license") = "Apache-2.0";
