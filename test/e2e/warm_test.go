package e2e_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// checkpoint is a state directory that agents of a test share.
type checkpoint struct {
	nodecache.Checkpoint
	t *testing.T
}

func newCheckpoint(t *testing.T) *checkpoint {
	return &checkpoint{nodecache.Checkpoint{Dir: filepath.Join(t.TempDir(), "state")}, t}
}

// until waits until what is saved meets the condition, which says what it
// misses.
func (k *checkpoint) until(f func(s *nodecache.Saved) error) {
	k.t.Helper()
	harness.Eventually(k.t, 2*soon, func() error {
		s, err := k.Load()
		if err == nil {
			err = f(s)
		}
		return err
	})
}

// owners waits until so many owners are saved.
func (k *checkpoint) owners(n int) {
	k.t.Helper()
	k.until(func(s *nodecache.Saved) error {
		if len(s.Infos) != n {
			return fmt.Errorf("%d owners are saved, want %d", len(s.Infos), n)
		}
		return nil
	})
}

func (a *agentProcess) part(name string) string { return a.status().Parts[name] }

func TestWarmRestartServesTheSameAndAsksNobody(t *testing.T) {
	for how, end := range map[string]func(*agentProcess){"killed": (*agentProcess).kill, "stopped": (*agentProcess).stop} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			w, s, k := newWorld(t), newSite(t), newCheckpoint(t)
			r := newReflections()
			w.serve("web-1-a", []string{"shop.Web", "shop.Admin"}, r.option())
			w.serve("web-1-b", []string{"shop.Web", "shop.Admin"}, r.option())
			w.serve("cart-1-a", []string{"shop.Cart"}, r.option())
			w.write()
			clusters := []string{"prod/shop.Admin", "prod/shop.Cart", "prod/shop.Web"}
			args := []string{"--source", w.source(), "--state-dir", k.Dir}
			a := s.start(t, args...).ready()
			delta := connectRaw(t, s.ads, client.Options{Delta: true})
			sotw := connectRaw(t, s.ads, client.Options{})
			for _, c := range []*rawClient{delta, sotw} {
				c.subscribeAll(clusters...)
				c.has(xds.Endpoint, clusters...)
				c.has(xds.Listener, "egress")
				c.has(xds.Route, "egress")
			}
			if how == "killed" {
				k.owners(2)
			}
			end(a)
			_ = delta.end()
			_ = sotw.end()
			streams := r.streams()

			r.hold()
			defer r.release()
			a = s.start(t, args...).ready()
			deltaAgain := connectRaw(t, s.ads, client.Options{Delta: true, Memory: delta.Memory()})
			sotwAgain := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
			fresh := connectRaw(t, s.ads, client.Options{Delta: true})
			deltaAgain.subscribeAll(clusters...)
			sotwAgain.subscribeAll(clusters...)
			fresh.subscribeAll(clusters...)
			fresh.has(xds.Endpoint, clusters...)
			fresh.has(xds.Listener, "egress")
			fresh.has(xds.Route, "egress")
			if was, is := delta.versions(), fresh.versions(); !maps.Equal(was, is) {
				t.Errorf("versions were %v, are %v after the restart", was, is)
			}
			// Named sets are answered again, with the version that is known.
			sotwAgain.until(func() error {
				if len(sotwAgain.of(xds.Endpoint)) == 0 || len(sotwAgain.of(xds.Route)) == 0 {
					return errors.New("the SotW client is not answered")
				}
				return nil
			})
			for _, resp := range sotwAgain.responses() {
				if was := sotw.Memory().Versions[resp.Type]; resp.Version != was {
					t.Errorf("%s has version %s, was %s", resp.Type, resp.Version, was)
				}
			}
			for _, o := range a.owners() {
				if o.Origin != "checkpoint" || o.Knowledge != "known" {
					t.Errorf("owner %+v", o)
				}
			}
			if n := r.streams(); n != streams {
				t.Errorf("%d reflection streams after the restart", n-streams)
			}
			// What changes next comes after all that the restart could have caused.
			w.remove(w.pods[1])
			w.write()
			deltaAgain.until(func() error {
				if got, err := endpointsIn(deltaAgain.Memory(), "prod/shop.Web"); err != nil || len(got) != 1 {
					return fmt.Errorf("endpoints %v, %v", got, err)
				}
				return nil
			})
			for _, word := range deltaAgain.spoken() {
				if word != "eds prod/shop.Web" && word != "eds prod/shop.Admin" {
					t.Errorf("the delta client was sent %s", word)
				}
			}
			if p := a.part("checkpoint"); p != "on" {
				t.Errorf("status says checkpoint: %s", p)
			}
		})
	}
}

func TestWarmRestartSeesWhatChangedMeanwhile(t *testing.T) {
	t.Parallel()
	w, s, k := newWorld(t), newSite(t), newCheckpoint(t)
	r := newReflections()
	web, _ := w.serve("web-1-a", []string{"shop.Web"}, r.option())
	w.serve("cart-1-a", []string{"shop.Cart"}, r.option())
	w.write()
	args := []string{"--source", w.source(), "--state-dir", k.Dir}
	a := s.start(t, args...).ready()
	k.owners(2)
	a.kill()

	w.remove(web)
	_, moved := w.serve("cart-1-b", []string{"shop.Cart"}, r.option())
	w.remove(w.pods[0])
	w.serve("new-1-a", []string{"shop.New"}, r.option())
	// Another revision of a workload that is known.
	w.serve("cart-2-a", []string{"shop.Cart", "shop.Cart2"}, r.option())
	w.write()
	streams := r.streams()
	a = s.start(t, args...).ready()
	got := map[string]string{}
	for _, o := range a.owners() {
		got[o.Name] = o.Origin + " " + strings.Join(o.Services, ",")
	}
	want := map[string]string{
		"ReplicaSet/cart-1": "checkpoint shop.Cart",
		"ReplicaSet/cart-2": "self shop.Cart,shop.Cart2",
		"ReplicaSet/new-1":  "self shop.New",
	}
	if !maps.Equal(got, want) {
		t.Errorf("owners %v, want %v", got, want)
	}
	if n := r.streams() - streams; n != 2 {
		t.Errorf("%d reflection streams, want those of the two owners that are new", n)
	}
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	// What is known of web outlives its pods for a while, as ever.
	c.has(xds.Cluster, "prod/shop.Cart", "prod/shop.Cart2", "prod/shop.New", "prod/shop.Web")
	c.subscribe(xds.Endpoint, "prod/shop.Web")
	c.endpoints("prod/shop.Web")
	for _, v := range a.services() {
		if v.Name == "shop.Cart" && !slices.ContainsFunc(v.Endpoints, func(e resources.EndpointView) bool { return e.Address == moved.Addr() }) {
			t.Errorf("the pod that is new is not served: %+v", v)
		}
	}
}

func TestStateDirectoryThatIsOfNoUseChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	broken := newCheckpoint(t)
	if err := os.MkdirAll(broken.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(broken.Dir, "checkpoint"), []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ dir, part, said string }{
		{filepath.Join(file, "state"), "off: ", "cannot be kept"},
		{broken.Dir, "on", "is set aside"},
		{"", "off: no --state-dir", ""},
	} {
		s := newSite(t)
		a := s.start(t, "--source", w.source(), "--state-dir", c.dir).ready()
		if p := a.part("checkpoint"); !strings.HasPrefix(p, c.part) {
			t.Errorf("%q: status says %q, want %q", c.dir, p, c.part)
		}
		cl := connectRaw(t, s.ads, client.Options{Delta: true})
		cl.subscribe(xds.Cluster)
		cl.has(xds.Cluster, "prod/shop.Web")
		a.stop()
		if n := strings.Count(a.log.String(), "level=WARN"); n > 1 || (n == 1) != (c.said != "") || !strings.Contains(a.log.String(), c.said) {
			t.Errorf("%q: %d warnings, want %q", c.dir, n, c.said)
		}
	}
	broken.owners(1)
}

// gateway stands before the API server and counts what is asked of pods.
type gateway struct {
	*httptest.Server
	kubeconfig string

	mu      sync.Mutex
	lists   int
	watches []string // the versions from which they were
}

func (c *cluster) gateway(t *testing.T) *gateway {
	t.Helper()
	target, err := url.Parse(c.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(&rest.Config{TLSClientConfig: c.Config.TLSClientConfig})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(c.kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	// A client keeps its token from an address that is not encrypted.
	bearer := "Bearer " + config.AuthInfos["admin"].Token
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Header.Set("Authorization", bearer)
		},
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	g := &gateway{}
	g.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); r.URL.Path == "/api/v1/pods" {
			g.mu.Lock()
			if q.Get("fieldSelector") != "" {
				// It selects nothing.
			} else if q.Get("watch") == "" || q.Get("sendInitialEvents") == "true" {
				g.lists++
			} else {
				g.watches = append(g.watches, q.Get("resourceVersion"))
			}
			g.mu.Unlock()
		}
		proxy.ServeHTTP(rw, r)
	}))
	t.Cleanup(g.Close)
	for _, cluster := range config.Clusters {
		cluster.Server, cluster.CertificateAuthorityData = g.URL, nil
	}
	g.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, g.kubeconfig); err != nil {
		t.Fatal(err)
	}
	return g
}

// asked returns and forgets what was asked.
func (g *gateway) asked() (lists int, watches []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	lists, watches = g.lists, g.watches
	g.lists, g.watches = 0, nil
	return lists, watches
}

func TestWarmRestartResumesFromTheAPIServer(t *testing.T) {
	c := newCluster(t)
	r := newReflections()
	old, oldServer := c.serve("cart-1-a", []string{"shop.v1.Cart"}, r.option())
	gone, _ := c.serve("gone-1-a", []string{"shop.v1.Gone"}, r.option())
	g, s, k := c.gateway(t), newSite(t), newCheckpoint(t)
	args := []string{"--source", "kube", "--kubeconfig", g.kubeconfig, "--state-dir", k.Dir}
	name := func(service string) string { return c.ns + "/shop.v1." + service }
	node := &corev3.Node{Id: c.ns + "/web"}
	a := s.start(t, args...).ready()
	before := connectRaw(t, s.ads, client.Options{Delta: true, Node: node})
	before.subscribeAll(name("Cart"), name("Gone"))
	before.has(xds.Cluster, name("Cart"), name("Gone"))
	before.has(xds.Endpoint, name("Cart"), name("Gone"))
	before.has(xds.Route, "egress")
	if lists, _ := g.asked(); lists == 0 {
		t.Fatal("the gateway has seen no list")
	}
	a.stop() // which saves the pods
	_ = before.end()
	streams := r.streams()

	// Nothing has changed: nothing is sent, nobody is asked.
	r.hold()
	a = s.start(t, args...).ready()
	same := connectRaw(t, s.ads, client.Options{Delta: true, Node: node, Memory: before.Memory()})
	same.subscribeAll(name("Cart"), name("Gone"))
	fresh := connectRaw(t, s.ads, client.Options{Delta: true, Node: node})
	fresh.subscribeAll(name("Cart"), name("Gone"))
	fresh.has(xds.Cluster, name("Cart"), name("Gone"))
	fresh.has(xds.Endpoint, name("Cart"), name("Gone"))
	fresh.has(xds.Route, "egress")
	fresh.has(xds.Listener, "egress")
	if was, is := before.versions(), fresh.versions(); !maps.Equal(was, is) {
		t.Errorf("versions were %v, are %v after the restart", was, is)
	}
	saved, err := k.Load()
	if err != nil {
		t.Fatal(err)
	}
	if lists, watches := g.asked(); lists != 0 || !slices.Contains(watches, fmt.Sprint(saved.Pods.Version)) {
		t.Errorf("%d lists, watches from %v, want one from %d", lists, watches, saved.Pods.Version)
	}
	a.kill()
	if got := same.spoken(); len(got) != 0 {
		t.Errorf("the client was sent %v", got)
	}
	_ = same.end()

	// What happened meanwhile is heard of.
	c.Remove(t, old)
	c.Remove(t, gone)
	_, next := c.serve("cart-1-b", []string{"shop.v1.Cart"}, r.option())
	if next.Port() != oldServer.Port() {
		t.Fatal("the owner's port changed")
	}
	s.start(t, args...).ready()
	again := connectRaw(t, s.ads, client.Options{Delta: true, Node: node, Memory: before.Memory()})
	again.subscribeAll(name("Cart"), name("Gone"))
	again.endpoints(name("Cart"), next.Addr())
	again.endpoints(name("Gone"))
	again.has(xds.Cluster, name("Cart"), name("Gone"))
	if lists, _ := g.asked(); lists != 0 {
		t.Errorf("%d lists", lists)
	}
	if n := r.streams(); n != streams {
		t.Errorf("%d reflection streams after the restart", n-streams)
	}
	r.release()
}

// An API server that was started anew knows nothing of what was before.
func TestWarmRestartListsWhereTheVersionIsTooOld(t *testing.T) {
	c := inCluster(t, harness.StartAPIServer(t))
	r := newReflections()
	old, server := c.serve("cart-1-a", []string{"shop.v1.Cart"}, r.option())
	g, s, k := c.gateway(t), newSite(t), newCheckpoint(t)
	args := []string{"--source", "kube", "--kubeconfig", g.kubeconfig, "--state-dir", k.Dir}
	node := &corev3.Node{Id: c.ns + "/web"}
	name := c.ns + "/shop.v1.Cart"
	a := s.start(t, args...).ready()
	before := connectRaw(t, s.ads, client.Options{Delta: true, Node: node})
	before.subscribeAll(name)
	before.endpoints(name, server.Addr())
	a.stop()
	_ = before.end()
	streams := r.streams()

	_, next := c.serve("cart-1-b", []string{"shop.v1.Cart"}, r.option())
	c.Remove(t, old)
	c.Restart(t)
	g.asked()
	a = s.start(t, args...).ready()
	after := connectRaw(t, s.ads, client.Options{Delta: true, Node: node, Memory: before.Memory()})
	after.subscribeAll(name)
	after.endpoints(name, next.Addr())
	if lists, watches := g.asked(); lists == 0 || len(watches) == 0 {
		t.Errorf("%d lists, watches from %v, want a watch in vain and a list", lists, watches)
	}
	if !strings.Contains(a.log.String(), "does not resume") {
		t.Error("the log does not say that the version is too old")
	}
	if got := after.spoken(); !slices.Equal(got, []string{"eds " + name}) {
		t.Errorf("the client was sent %v, want the new endpoints alone", got)
	}
	if n := r.streams(); n != streams {
		t.Errorf("%d reflection streams after the restart", n-streams)
	}
}

// A name that a client brings is gone only when the watch has caught up.
func TestResumedWatchRemovesWhatIsNotThere(t *testing.T) {
	c := newCluster(t)
	c.serve("cart-1-a", []string{"shop.v1.Cart"})
	s, k := newSite(t), newCheckpoint(t)
	args := append(c.args(), "--state-dir", k.Dir)
	a := s.start(t, args...).ready()
	before := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: c.ns + "/web"}})
	before.subscribe(xds.Cluster)
	before.has(xds.Cluster, c.ns+"/shop.v1.Cart")
	a.stop()
	_ = before.end()

	// Versions go on without any event of a pod: only a bookmark can tell that
	// there was none.
	other := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	if _, err := c.Client.CoreV1().ConfigMaps(c.ns).Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	memory := before.Memory()
	memory.Resources[xds.Cluster][c.ns+"/shop.v1.Never"] = client.Resource{Name: c.ns + "/shop.v1.Never", Version: "1"}
	s.start(t, args...).ready()
	after := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: c.ns + "/web"}, Memory: memory})
	after.subscribe(xds.Cluster)
	after.has(xds.Cluster, c.ns+"/shop.v1.Cart")
}
