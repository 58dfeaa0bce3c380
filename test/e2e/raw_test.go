package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// rawClient is a client of the ADS socket that notes all it gets.
type rawClient struct {
	*client.Stream
	t     *testing.T
	ended chan struct{} // closed when the stream has ended

	mu  sync.Mutex
	got []client.Response
}

// connectRaw opens a stream that ends with the test.
func connectRaw(t *testing.T, socket string, o client.Options) *rawClient {
	t.Helper()
	conn, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	return openRaw(t, conn, o)
}

// openRaw is connectRaw by a connection, which ends with the test.
func openRaw(t *testing.T, conn *grpc.ClientConn, o client.Options) *rawClient {
	t.Helper()
	t.Cleanup(func() { conn.Close() })
	if o.Node == nil {
		o.Node = &corev3.Node{Id: "prod/client"}
	}
	s, err := client.Open(context.Background(), conn, o)
	if err != nil {
		t.Fatal(err)
	}
	c := &rawClient{Stream: s, t: t, ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		for r := range s.Responses() {
			c.mu.Lock()
			c.got = append(c.got, r)
			c.mu.Unlock()
		}
	}()
	t.Cleanup(c.close)
	return c
}

// close ends the stream and waits for that.
func (c *rawClient) close() {
	c.Close()
	<-c.ended
}

// subscribe is Subscribe of a stream that must not have ended.
func (c *rawClient) subscribe(t xds.Type, names ...string) {
	c.t.Helper()
	if err := c.Subscribe(t, names...); err != nil {
		c.t.Fatalf("subscribe to %s: %v", t, c.Err())
	}
}

// subscribeAll asks for all that a sidecar asks for, with these clusters.
func (c *rawClient) subscribeAll(clusters ...string) {
	c.t.Helper()
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, clusters...)
	c.subscribe(xds.Listener)
	c.subscribe(xds.Route, "egress")
}

// responses are those that came so far.
func (c *rawClient) responses() []client.Response {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.got)
}

// of are the responses of a type that came so far.
func (c *rawClient) of(t xds.Type) []client.Response {
	return slices.DeleteFunc(c.responses(), func(r client.Response) bool { return r.Type != t })
}

// spoken is one word for each resource that came or was removed so far: its
// type and name, with a dash before those removed.
func (c *rawClient) spoken() []string {
	var words []string
	for _, r := range c.responses() {
		for _, n := range r.Names() {
			words = append(words, r.Type.String()+" "+n)
		}
		for _, n := range r.Removed {
			words = append(words, r.Type.String()+" -"+n)
		}
	}
	return words
}

// removals is what was removed so far.
func (c *rawClient) removals() []string {
	return slices.DeleteFunc(c.spoken(), func(w string) bool { return !strings.Contains(w, " -") })
}

// names are those of the resources that the client has, sorted.
func (c *rawClient) names(t xds.Type) []string {
	return slices.Sorted(maps.Keys(c.Memory().Resources[t]))
}

// versions are those of the resources that the client has, by type and name.
func (c *rawClient) versions() map[string]string {
	all := map[string]string{}
	for t, rs := range c.Memory().Resources {
		for n, r := range rs {
			all[xds.Type(t).String()+" "+n] = r.Version
		}
	}
	return all
}

// until waits for a condition, which says what it misses.
func (c *rawClient) until(f func() error) {
	c.t.Helper()
	harness.Eventually(c.t, soon, f)
}

// has waits until the client has just these resources of a type.
func (c *rawClient) has(t xds.Type, names ...string) {
	c.t.Helper()
	slices.Sort(names)
	c.until(func() error {
		if got := c.names(t); !slices.Equal(got, names) {
			return fmt.Errorf("the client has %s %v, want %v (stream: %v)", t, got, names, c.Err())
		}
		return nil
	})
}

// endpoints waits until the client has a CLA with just these addresses.
func (c *rawClient) endpoints(cluster string, addrs ...string) {
	c.t.Helper()
	slices.Sort(addrs)
	c.until(func() error {
		got, err := endpointsIn(c.Memory(), cluster)
		if err == nil && !slices.Equal(got, addrs) {
			err = fmt.Errorf("the client has endpoints %v of %s, want %v (stream: %v)", got, cluster, addrs, c.Err())
		}
		return err
	})
}

// endpointsIn are the addresses in a CLA, sorted; an error if there is none.
func endpointsIn(m client.Memory, cluster string) ([]string, error) {
	r, ok := m.Resources[xds.Endpoint][cluster]
	if !ok {
		return nil, fmt.Errorf("the client has no CLA of %s", cluster)
	}
	var cla endpointv3.ClusterLoadAssignment
	if err := r.Body.UnmarshalTo(&cla); err != nil {
		return nil, err
	}
	addrs := []string{}
	for _, l := range cla.GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			addrs = append(addrs, fmt.Sprintf("%s:%d", a.GetAddress(), a.GetPortValue()))
		}
	}
	slices.Sort(addrs)
	return addrs, nil
}

// end waits for the end of the stream and returns its error.
func (c *rawClient) end() error {
	c.t.Helper()
	harness.Eventually(c.t, soon, func() error {
		select {
		case <-c.ended:
			return nil
		default:
			return errors.New("the stream goes on")
		}
	})
	return c.Err()
}

// reflections counts the reflection streams to the samples that have its
// option, and holds them while it is told to.
type reflections struct {
	mu     sync.Mutex
	count  int
	opened chan struct{} // closed while streams pass
}

func newReflections() *reflections {
	r := &reflections{opened: make(chan struct{})}
	close(r.opened)
	return r
}

// hold lets no further stream get an answer until release.
func (r *reflections) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opened = make(chan struct{})
}

// release answers the streams that are held, and all later ones.
func (r *reflections) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.opened)
}

// streams is how many there were.
func (r *reflections) streams() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count
}

func (r *reflections) option() grpc.ServerOption {
	return grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if strings.HasPrefix(info.FullMethod, "/grpc.reflection.") {
			r.mu.Lock()
			r.count++
			opened := r.opened
			r.mu.Unlock()
			select {
			case <-opened:
			case <-ss.Context().Done():
				return ss.Context().Err()
			}
		}
		return handle(srv, ss)
	})
}
