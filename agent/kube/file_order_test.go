package kube_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// movedWorld has n routes, each to a Service of its own with a pod. The
// Services of one color are not those of the other.
func movedWorld(n int, color string, first int) string {
	var b strings.Builder
	for i := range n {
		name := fmt.Sprintf("%s-%d", color, i)
		b.WriteString(podYAML(name, "uid-"+name, fmt.Sprintf("10.%d.%d.%d", first, i/250, 1+i%250)))
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {namespace: prod, name: %[1]s, uid: s-%[1]s}
spec: {ports: [{name: grpc, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: prod, name: %[1]s, uid: e-%[1]s, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: grpc, port: 50051, protocol: TCP}]
endpoints: [{addresses: [10.0.0.1], targetRef: {kind: Pod, uid: uid-%[1]s}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {namespace: prod, name: route-%[2]d, uid: route-%[2]d, generation: 1}
spec:
  parentRefs: [{group: "", kind: Service, name: front}]
  rules: [{backendRefs: [{name: %[1]s, port: 80}]}]
`, name, i)
	}
	return b.String()
}

// dangling says what a route leads to that gets no call; empty for nothing.
func dangling(d *nodecache.Directory, r *nodecache.Route) string {
	service := r.Rules[0].Backends[0].Service
	v := d.Front(service)
	if v == nil {
		return service.String() + " is not there"
	}
	ms := v.Members()
	if len(ms) != 1 {
		return fmt.Sprintf("%s has %d members", service, len(ms))
	}
	if _, ok := d.Member(ms[0].Pod); !ok {
		return service.String() + " has a pod that is not there"
	}
	return ""
}

// One edit moves every route to another Service, and drops the Service, the
// slice and the pod that it left.
func TestEditNeverLeavesARouteWithoutItsBackend(t *testing.T) {
	const n = 300
	dir := t.TempDir()
	path := filepath.Join(dir, "world.yaml")
	write(t, path, movedWorld(n, "blue", 1))
	x := newFile(path)
	run(t, x.src)
	waitSynced(t, x.src)
	stop, done := make(chan struct{}), make(chan string, 1)
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, r := range x.dir.Routes() {
				why := dangling(x.dir, r)
				// It may have moved since it was read.
				if why != "" && x.dir.Route(r.UID) == r {
					done <- fmt.Sprintf("%s: %s", r.Name, why)
					return
				}
			}
		}
	}()
	for i, color := range []string{"green", "blue", "green", "blue"} {
		replace(t, path, movedWorld(n, color, 2+i))
		eventually(t, func() string {
			if got := x.dir.FrontNames(); len(got) != n || !strings.HasPrefix(got[0].Name, color) {
				return fmt.Sprintf("%d Services, as %v", len(got), got[0])
			}
			return x.src.Status().Error
		})
	}
	close(stop)
	if why := <-done; why != "" {
		t.Error(why)
	}
}
