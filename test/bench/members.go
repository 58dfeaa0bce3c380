package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds"
)

// members are the clients of a crowd.
type members struct {
	all    []*member
	cancel []context.CancelFunc
	last   atomic.Pointer[assignment]
}

// member is one client: CDS by wildcard, EDS by name, delta. It acknowledges
// whatever comes, before it looks at what it is.
type member struct {
	crowd *members
	id    int32
	each  int
	conn  *grpc.ClientConn
	read  atomic.Int64 // bytes off the socket
	ended chan struct{}

	// mu guards what came.
	mu     sync.Mutex
	events []event
}

// assignment is a CLA that was decoded: most members get the same one.
type assignment struct {
	body    []byte
	service int32
	members uint64
}

func (m *members) connect(ctx context.Context, o order) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	m.cancel = append(m.cancel, cancel)
	names := make([]string, o.Services)
	for i := range names {
		names[i] = declaredName(i)
	}
	synced := make(chan error, o.Clients)
	began := now()
	for range o.Clients {
		c := &member{crowd: m, id: int32(len(m.all)), each: o.Each, ended: make(chan struct{})}
		if err := c.dial(o.Path); err != nil {
			return 0, err
		}
		m.all = append(m.all, c)
		go func() {
			defer close(c.ended)
			if err := c.follow(ctx, names, synced); ctx.Err() == nil {
				synced <- fmt.Errorf("client %d: %w", c.id, err)
			}
		}()
	}
	limit := time.After(3 * time.Minute)
	for range o.Clients {
		select {
		case err := <-synced:
			if err != nil {
				return 0, err
			}
		case <-limit:
			return 0, errors.New("not all clients have everything after 3 minutes")
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return time.Duration(now() - began), nil
}

func (m *members) take() (events []event, read int64) {
	for _, c := range m.all {
		c.mu.Lock()
		events = append(events, c.events...)
		c.events = c.events[:0]
		c.mu.Unlock()
		read += c.read.Swap(0)
	}
	return events, read
}

func (m *members) leave() {
	for _, cancel := range m.cancel {
		cancel()
	}
	for _, c := range m.all {
		_ = c.conn.Close()
		<-c.ended
	}
	m.all, m.cancel = nil, nil
}

// dial makes a connection with windows as wide as an Envoy's, and none of the
// pings by which grpc-go measures how wide they should be.
func (c *member) dial(path string) (err error) {
	c.conn, err = grpc.NewClient("passthrough:///bench",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(16<<20), grpc.WithStaticConnWindowSize(24<<20),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "unix", path)
			return &countedConn{conn, &c.read}, err
		}))
	return err
}

// follow runs until the stream ends. synced gets nil once everything has come.
func (c *member) follow(ctx context.Context, names []string, synced chan<- error) error {
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName)
	if err != nil {
		return err
	}
	send := func(r *discovery.DeltaDiscoveryRequest) error {
		raw, err := proto.Marshal(r)
		if err != nil {
			return err
		}
		return stream.SendMsg(&raw)
	}
	for _, r := range []*discovery.DeltaDiscoveryRequest{
		{Node: &corev3.Node{Id: fmt.Sprintf("%s/client-%d", benchNamespace, c.id)}, TypeUrl: xds.Cluster.URL()},
		{TypeUrl: xds.Endpoint.URL(), ResourceNamesSubscribe: names},
	} {
		if err := send(r); err != nil {
			return err
		}
	}
	missing := 2 * len(names)
	for {
		var raw []byte
		if err := stream.RecvMsg(&raw); err != nil {
			return err
		}
		at := now()
		r, err := readResponse(raw)
		if err != nil {
			return err
		}
		if err := send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.url, ResponseNonce: r.nonce}); err != nil {
			return err
		}
		if missing > 0 {
			if missing -= len(r.bodies); missing <= 0 {
				synced <- nil
			}
			continue
		}
		if r.url == xds.Endpoint.URL() {
			if err := c.note(at, len(raw), r.bodies); err != nil {
				return err
			}
		}
	}
}

func (c *member) note(at int64, size int, bodies [][]byte) error {
	for _, body := range bodies {
		a := c.crowd.last.Load()
		if a == nil || !bytes.Equal(a.body, body) {
			var err error
			if a, err = decodeAssignment(body, c.each); err != nil {
				return err
			}
			c.crowd.last.Store(a)
		}
		c.mu.Lock()
		c.events = append(c.events, event{Client: c.id, Service: a.service, At: at, Members: a.members, Message: int32(size), CLA: int32(len(body)), Of: int32(len(bodies))})
		c.mu.Unlock()
	}
	return nil
}

func decodeAssignment(body []byte, each int) (*assignment, error) {
	var cla endpointv3.ClusterLoadAssignment
	if err := proto.Unmarshal(body, &cla); err != nil {
		return nil, err
	}
	a := &assignment{body: body}
	if _, err := fmt.Sscanf(cla.GetClusterName(), declaredFormat, &a.service); err != nil {
		return nil, err
	}
	for _, l := range cla.GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			addr, err := netip.ParseAddr(e.GetEndpoint().GetAddress().GetSocketAddress().GetAddress())
			if err != nil {
				return nil, err
			}
			a.members |= 1 << (podAt(addr) % each)
		}
	}
	return a, nil
}

// response is what of a delta response has to be read at once.
type response struct {
	url, nonce string
	bodies     [][]byte // of its resources, in raw
}

func readResponse(raw []byte) (r response, err error) {
	err = fields(raw, func(n protowire.Number, v []byte) error {
		switch n {
		case 2:
			return fields(v, func(n protowire.Number, v []byte) error {
				if n != 2 {
					return nil
				}
				return fields(v, func(n protowire.Number, v []byte) error {
					if n == 2 {
						r.bodies = append(r.bodies, v)
					}
					return nil
				})
			})
		case 4:
			r.url = string(v)
		case 5:
			r.nonce = string(v)
		}
		return nil
	})
	return r, err
}

// fields calls f with each length-delimited field of a message.
func fields(b []byte, f func(protowire.Number, []byte) error) error {
	for len(b) > 0 {
		n, kind, head := protowire.ConsumeTag(b)
		if head < 0 {
			return protowire.ParseError(head)
		}
		size := protowire.ConsumeFieldValue(n, kind, b[head:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		if kind == protowire.BytesType {
			v, _ := protowire.ConsumeBytes(b[head:])
			if err := f(n, v); err != nil {
				return err
			}
		}
		b = b[head+size:]
	}
	return nil
}

// rawCodec hands messages over as they are, so that the time of their arrival
// is not that of their decoding.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// countedConn counts what is read.
type countedConn struct {
	net.Conn
	read *atomic.Int64
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}
