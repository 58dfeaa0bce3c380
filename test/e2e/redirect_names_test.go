package e2e_test

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
)

// dns is a server of names at an address of the node, which knows these addresses and
// no other name. It returns the file that a kubelet gives a pod of the namespace prod.
func (n *redirectNode) dns(addr string, names map[string][]string) (resolvConf string) {
	n.t.Helper()
	n.network.Claim(n.t, addr)
	var conn net.PacketConn
	if err := n.network.Do(func() (err error) { conn, err = net.ListenPacket("udp4", addr+":53"); return err }); err != nil {
		n.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 1500); ; {
			k, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			answer, err := resolve(b[:k], names)
			if err == nil {
				_, err = conn.WriteTo(answer, from)
			}
			if err != nil {
				n.t.Errorf("a query of %s: %v", from, err)
			}
		}
	}()
	n.t.Cleanup(func() { conn.Close(); <-done })
	resolvConf = filepath.Join(n.t.TempDir(), "resolv.conf")
	text := "nameserver " + addr + "\nsearch prod.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"
	if err := os.WriteFile(resolvConf, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	return resolvConf
}

func resolve(query []byte, names map[string][]string) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil || len(m.Questions) != 1 {
		return nil, fmt.Errorf("%d questions: %w", len(m.Questions), err)
	}
	q := m.Questions[0]
	m = dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true, RecursionDesired: m.RecursionDesired}, Questions: m.Questions}
	addrs, ok := names[q.Name.String()]
	if !ok {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, text := range addrs {
		h := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 5}
		switch addr := netip.MustParseAddr(text); {
		case q.Type == dnsmessage.TypeA && addr.Is4():
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: addr.As4()}})
		case q.Type == dnsmessage.TypeAAAA && addr.Is6():
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}})
		}
	}
	return m.Pack()
}

// An application that knows the names of Services alone, and what a kubelet tells
// every pod, reaches the pods of each that implement what it calls.
func TestApplicationThatDialsNamesIsRedirected(t *testing.T) {
	n, one, two := redirectedShop(t)
	for _, o := range n.more {
		if svc, ok := o.(*corev1.Service); ok {
			svc.Spec.Ports[0].Port = 50051
		}
	}
	n.listens("directly", "10.96.0.10:50051", "shop.Users")
	n.listens("directly", "10.96.0.11:50051", "shop.Users")
	users, canary := []string{"10.96.0.10", "fd00:96::10"}, []string{"10.96.0.11"}
	conf := n.dns("10.96.0.53", map[string][]string{"users.prod.svc.cluster.local.": users, "users-canary.prod.svc.cluster.local.": canary})
	a := n.agent()
	for _, c := range []*caller{one, two} {
		c.sidecar()
		c.reach("10.96.0.10:50051", "shop.Users", "users-1-a users-1-b")
		c.reach("10.96.0.11:50051", "shop.Users", "canary-1-a")
		for _, row := range []struct {
			target, service, want string
			dialled               []string
		}{
			{"users.prod.svc:50051", "shop.Users", "users-1-a users-1-b", users},
			{"users.prod.svc:50051", "shop.Other", "odd-1-a", users},
			{"users-canary.prod.svc:50051", "shop.Users", "canary-1-a", canary},
			{"users-canary.prod.svc:50051", "shop.Other", "canary-1-a", canary},
			{"users-canary:50051", "shop.Users", "canary-1-a", canary},
			{"users.prod.svc.cluster.local.:50051", "shop.Users", "users-1-a users-1-b", users},
			{mappedPrefix + "[::ffff:10.96.0.10]:50051", "shop.Users", "users-1-a users-1-b", users[:1]},
			{mappedPrefix + "[::ffff:10.96.0.11]:50051", "shop.Other", "canary-1-a", canary},
			{mappedPrefix + "[::ffff:10.77.5.2]:50051", "shop.Users", "users-1-b", []string{"10.77.5.2"}},
		} {
			by := map[string]bool{}
			for i, got := range c.run(errand{Service: row.service, Targets: slices.Repeat([]string{row.target}, 16), Workers: 4, Chat: true, ResolvConf: conf}) {
				by[got.Said] = true
				peer, err := netip.ParseAddrPort(got.Peer)
				if got.Err != "" || err != nil || peer.Port() != 50051 || !slices.Contains(row.dialled, peer.Addr().String()) {
					t.Fatalf("call %d of %s to %s from %s: %+v", i, row.service, row.target, c.id, got)
				}
				who, _, _ := strings.Cut(got.Chat[0], ":")
				if !slices.Equal(got.Chat, []string{who + ": 0", who + ": 1", who + ": 2"}) {
					t.Errorf("a stream of %s to %s from %s says %q", row.service, row.target, c.id, got.Chat)
				}
				by[who] = true
			}
			if got := strings.Join(slices.Sorted(maps.Keys(by)), " "); got != row.want {
				t.Errorf("calls of %s to %s from %s are answered by %q, want %q", row.service, row.target, c.id, got, row.want)
			}
		}
	}
	for _, row := range []struct {
		from, authority string
		says            []string
	}{
		{"prod/one-1-a", "users.prod.svc:50051", []string{"a connection to 10.96.0.10:50051 goes to the sidecar, by 127.", "a connection to [fd00:96::10]:50051 goes to the sidecar, by 127."}},
		{"prod/one-1-a", "10.77.5.2:50051", []string{"a connection to 10.77.5.2:50051 goes to the sidecar, by 127."}},
		{"prod/one-1-a", "10.77.5.2:9", []string{"a connection to 10.77.5.2:9 goes where it is dialled"}},
		{"prod/users-1-a", "10.96.0.10:50051", []string{"connections of prod/users-1-a go where they are dialled"}},
	} {
		out := a.must("explain", "call", "--from", row.from, "--authority", row.authority, "/shop.Users/Say")
		for _, want := range row.says {
			if !strings.Contains(out, want) {
				t.Errorf("of a call from %s to %s is said\n%s\nwant %q", row.from, row.authority, out, want)
			}
		}
		// It is the name by which the sidecar has it.
		if _, cluster, ok := strings.Cut(out, ": cluster to/"); ok {
			cluster, _, _ = strings.Cut(cluster, "\n")
			if clusters := one.envoy.Admin(t, "/clusters"); !strings.Contains(clusters, "to/"+strings.TrimSpace(cluster)+"::") {
				t.Errorf("the sidecar has no cluster to/%s:\n%s", cluster, clusters)
			}
		}
	}
}
