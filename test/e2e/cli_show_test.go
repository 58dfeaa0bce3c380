package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// wantKeys checks that a JSON object has just these keys.
func wantKeys(t *testing.T, what string, v any, keys ...string) map[string]any {
	t.Helper()
	o, ok := v.(map[string]any)
	if !ok {
		t.Fatalf("%s is %v, want an object", what, v)
	}
	slices.Sort(keys)
	if got := slices.Sorted(maps.Keys(o)); !slices.Equal(got, keys) {
		t.Errorf("%s has the keys %v, want %v", what, got, keys)
	}
	return o
}

// list checks that a JSON value is a list (not null) of n.
func list(t *testing.T, what string, v any, n int) []any {
	t.Helper()
	l, ok := v.([]any)
	if !ok || len(l) != n {
		t.Fatalf("%s is %v, want a list of %d", what, v, n)
	}
	return l
}

// decoded parses the JSON that a command prints.
func decoded(t *testing.T, a *agentProcess, command ...string) any {
	t.Helper()
	var v any
	out := a.must(append(command, "-o", "json")...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("fingerpost %v: %v in %s", command, err, out)
	}
	return v
}

func TestCommandsShowAnEmptyWorld(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	a := s.start(t, "--source", w.write().source()).ready()
	for _, command := range []string{"services", "owners", "proxies"} {
		if out := strings.TrimSpace(a.must(command, "-o", "json")); out != "[]" {
			t.Errorf("%s -o json says %q, want []", command, out)
		}
		if out := strings.TrimSpace(a.must(command, "-o", "yaml")); out != "[]" {
			t.Errorf("%s -o yaml says %q, want []", command, out)
		}
		if out := a.must(command); strings.Count(out, "\n") != 1 {
			t.Errorf("%s says %q, want a heading", command, out)
		}
	}
	st := wantKeys(t, "status", decoded(t, a, "status"), "node", "version", "source", "gate", "reason", "owners", "pods", "proxies", "nacks", "parts")
	src := wantKeys(t, "source", st["source"], "kind", "synced", "stale_seconds", "error")
	if src["kind"] != "file" || src["synced"] != true || src["stale_seconds"] != 0. || src["error"] != "" {
		t.Errorf("source: %v", src)
	}
	if st["node"] != "n1" || st["gate"] != "open" || st["reason"] != "" || st["pods"] != 0. || st["proxies"] != 0. || st["nacks"] != 0. {
		t.Errorf("status: %v", st)
	}
	a.must("status", "--check")
	for _, typ := range []string{"clusters", "endpoints"} {
		for _, delta := range []string{"--delta", "--delta=false"} {
			out, errs, code := run(t, "xds", "get", "--type", typ, delta, "--ads-socket", s.ads, "-o", "json")
			if code != 0 || errs != "" || strings.TrimSpace(out) != "[]" {
				t.Errorf("xds get --type %s %s: exit %d, %q, %q", typ, delta, code, out, errs)
			}
		}
	}
}

func TestCommandsShowWhatTheAgentKnows(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	web, _ := w.serve("web-1-a", []string{"shop.Web", "shop.Twice"})
	draining, _ := w.serve("web-1-b", []string{"shop.Web", "shop.Twice"})
	terminate(draining)
	w.serve("api-1-a", []string{"shop.Twice"})
	idle := w.add(newPod("idle-1-a", nextAddr(), 50051))
	idle.Status.Conditions[0].Status = corev1.ConditionFalse
	quiet := w.add(newPod("quiet-1-a", nextAddr(), 50051))
	quiet.Spec.Containers[0].Ports[0].Name = "http"
	a := s.start(t, "--source", w.write().source()).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/web-1-a"}})
	c.subscribe(xds.Cluster)
	c.has(xds.Cluster, "prod/shop.Twice", "prod/shop.Web")

	t.Run("services", func(t *testing.T) {
		services := list(t, "services", decoded(t, a, "services"), 2)
		for _, v := range services {
			wantKeys(t, "service", v, "name", "namespace", "owners", "claimants", "endpoints")
		}
		twice, web1 := services[0].(map[string]any), services[1].(map[string]any)
		if web1["name"] != "shop.Web" || web1["namespace"] != "prod" || list(t, "owners", web1["owners"], 1)[0] != "uid-web-1/1" {
			t.Errorf("service: %v", web1)
		}
		list(t, "claimants", web1["claimants"], 0)
		states := map[any]any{}
		for _, v := range list(t, "endpoints", web1["endpoints"], 2) {
			e := wantKeys(t, "endpoint", v, "address", "pod", "node", "state")
			states[e["pod"]] = e["state"]
			if e["pod"] == "prod/web-1-a" && (e["address"] != fmt.Sprintf("%s:%d", web.Status.PodIP, web.Spec.Containers[0].Ports[0].ContainerPort) || e["node"] != "n1") {
				t.Errorf("endpoint: %v", e)
			}
		}
		if states["prod/web-1-a"] != "serving" || states["prod/web-1-b"] != "draining" {
			t.Errorf("states: %v", states)
		}
		both := append(list(t, "owners", twice["owners"], 1), list(t, "claimants", twice["claimants"], 1)...)
		if !slices.Contains(both, any("uid-web-1/1")) || !slices.Contains(both, any("uid-api-1/1")) {
			t.Errorf("provider and claimant: %v", both)
		}
	})
	t.Run("owners", func(t *testing.T) {
		// The pod that is not Ready is no pod of an owner.
		owners := list(t, "owners", decoded(t, a, "owners"), 3)
		by := map[any]map[string]any{}
		for _, v := range owners {
			o := wantKeys(t, "owner", v, "key", "namespace", "name", "workload", "knowledge", "origin", "services", "pods", "reason", "added", "dropped", "previous")
			by[o["key"]] = o
		}
		o := by["uid-web-1/1"]
		if o["namespace"] != "prod" || o["name"] != "ReplicaSet/web-1" || o["workload"] != "ReplicaSet/web" || o["knowledge"] != "known" || o["origin"] != "self" || o["reason"] != "" {
			t.Errorf("owner: %v", o)
		}
		if !slices.Equal(list(t, "pods", o["pods"], 2), []any{"prod/web-1-a", "prod/web-1-b"}) || !slices.Equal(list(t, "services", o["services"], 2), []any{"shop.Twice", "shop.Web"}) {
			t.Errorf("owner: %v", o)
		}
		o = by["uid-quiet-1/1"]
		list(t, "services", o["services"], 0)
		if o["knowledge"] != "none" || o["reason"] == "" {
			t.Errorf("owner without a hint: %v", o)
		}
	})
	t.Run("proxies", func(t *testing.T) {
		var p map[string]any
		harness.Eventually(t, soon, func() error {
			p = wantKeys(t, "proxy", list(t, "proxies", decoded(t, a, "proxies"), 1)[0], "id", "pod", "connected", "delta", "clusters", "identity", "types")
			types, _ := p["types"].(map[string]any)
			if cds, _ := types["cds"].(map[string]any); cds["acked"] == "" {
				return errors.New("not acknowledged")
			}
			return nil
		})
		cds := wantKeys(t, "types", p["types"], "cds")["cds"]
		typ := wantKeys(t, "cds", cds, "sent", "acked", "nack")
		if typ["nack"] != nil || typ["sent"] != typ["acked"] {
			t.Errorf("cds: %v", typ)
		}
		id := wantKeys(t, "identity", p["identity"], "pod", "method", "reason")
		if p["id"] != "prod/web-1-a" || p["pod"] != "prod/web-1-a" || p["delta"] != true || p["clusters"] != "all" || id["method"] != "none" || !strings.HasSuffix(p["connected"].(string), "Z") {
			t.Errorf("proxy: %v", p)
		}
	})
	t.Run("tables and YAML", func(t *testing.T) {
		for command, want := range map[string]string{"status": "node", "services": "shop.Web", "owners": "ReplicaSet/web-1", "proxies": "prod/web-1-a"} {
			if out := a.must(command); !strings.Contains(out, want) {
				t.Errorf("%s does not show %s: %s", command, want, out)
			}
			var fromYAML any
			if err := yaml.Unmarshal([]byte(a.must(command, "-o", "yaml")), &fromYAML); err != nil {
				t.Errorf("%s -o yaml: %v", command, err)
			}
			if command == "services" {
				if j, _ := json.Marshal(fromYAML); !bytes.Contains(j, []byte(`"claimants":[]`)) {
					t.Errorf("services -o yaml is %s", j)
				}
			}
		}
	})
	t.Run("explain", func(t *testing.T) {
		for _, test := range []struct{ kind, name, want string }{
			{"pod", "prod/web-1-a", "is served: shop.Web; another workload provides shop.Twice"},
			{"pod", "prod/web-1-b", "draining"},
			{"pod", "prod/idle-1-a", "is not served: "},
			{"pod", "prod/quiet-1-a", "no port has a gRPC hint"},
			{"service", "shop.Web", "is served in 1 namespace(s)"},
			{"service", "shop.None", "is not served: no owner has it"},
			{"service", "shop.Twice", "gets no calls"},
			{"service", "grpc.health.v1.Health", "infrastructure"},
		} {
			if out := a.must("explain", test.kind, test.name); !strings.Contains(out, test.want) {
				t.Errorf("explain %s %s does not say %q:\n%s", test.kind, test.name, test.want, out)
			}
			e := wantKeys(t, "explanation", decoded(t, a, "explain", test.kind, test.name), "verdict", "facts")
			facts, ok := e["facts"].([]any)
			if !ok {
				t.Errorf("facts of %s are %v, want a list", test.name, e["facts"])
			}
			for _, f := range facts {
				wantKeys(t, "fact", f, "what", "says")
			}
		}
		refused(t, 1, "there is no pod prod/other", nil, "explain", "pod", "prod/other", "--admin-socket", s.admin)
	})
	t.Run("xds get", func(t *testing.T) {
		clusters := []string{"prod/shop.Twice", "prod/shop.Web"}
		for typ, names := range map[string][]string{"clusters": clusters, "endpoints": clusters, "listeners": {"egress"}, "routes": {"egress"}} {
			for _, delta := range []string{"--delta", "--delta=false"} {
				args := []string{"xds", "get", "--type", typ, delta, "--ads-socket", s.ads, "--node-id", "prod/web-1-a"}
				out, errs, code := run(t, append(args, "-o", "json")...)
				var v any
				if err := json.Unmarshal([]byte(out), &v); err != nil || code != 0 || errs != "" {
					t.Fatalf("%v: exit %d, %q, %v", args, code, errs, err)
				}
				var got []string
				for _, r := range list(t, typ, v, len(names)) {
					o := wantKeys(t, "resource", r, "name", "version", "resource")
					got = append(got, o["name"].(string))
					if body, ok := o["resource"].(map[string]any); !ok || body["name"] != o["name"] && body["clusterName"] != o["name"] || o["version"] == "" {
						t.Errorf("%v: %v", args, o)
					}
				}
				if !slices.Equal(got, names) {
					t.Errorf("%v: %v, want %v", args, got, names)
				}
				if out, errs, code := run(t, args...); code != 0 || errs != "" || !strings.Contains(out, names[0]) {
					t.Errorf("%v: exit %d, %q, %q", args, code, out, errs)
				}
			}
		}
		out, errs, code := run(t, "xds", "get", "--type", "endpoints", "--names", "prod/shop.Web", "--ads-socket", s.ads, "--node-id", "prod/web-1-a", "-o", "json")
		if code != 0 || errs != "" || strings.Count(out, `"clusterName"`) != 1 {
			t.Errorf("xds get --names: exit %d, %q, %q", code, out, errs)
		}
		refused(t, 1, "node id", nil, "xds", "get", "--type", "clusters", "--node-id", "Prod/web", "--ads-socket", s.ads)
	})
}

func TestStatusCheckFailsOnAClosedGateABrokenSourceAndANack(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	r.hold()
	w.serve("web-1-a", []string{"shop.Web"}, r.option())
	a := s.start(t, "--source", w.write().source()).live()
	check := func(text string) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			out, errs, code := run(t, "status", "--check", "--admin-socket", s.admin)
			want := 0
			if text != "" {
				want = 1
			}
			if code != want || !strings.Contains(errs, text) || (text == "") != (errs == "") || !strings.HasPrefix(out, "node") {
				return fmt.Errorf("status --check: exit %d, %q; want exit %d and %q", code, errs, want, text)
			}
			return nil
		})
	}
	check("gate is closed")
	r.release()
	a.ready()
	check("")
	w.writeRaw("kind: [")
	check(w.file)
	w.write()
	check("")

	for _, delta := range []bool{true, false} {
		reject := func(client.Response) client.Reply { return client.Reply{Nack: "not to my taste"} }
		c := connectRaw(t, s.ads, client.Options{Delta: delta, Reply: reject})
		c.subscribe(xds.Cluster)
		check("1 rejected by clients")
		nack := wantKeys(t, "nack", decoded(t, a, "proxies").([]any)[0].(map[string]any)["types"].(map[string]any)["cds"].(map[string]any)["nack"], "version", "error", "at")
		if nack["error"] != "not to my taste" || nack["version"] == "" {
			t.Errorf("nack: %v", nack)
		}
		if n := a.status().Nacks; n != 1 {
			t.Errorf("status counts %d NACKs", n)
		}
		c.close()
		check("")
	}
}

func TestWatchThatRejectsIsSeenInProxies(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	a := s.start(t, "--source", w.write().source()).ready()
	for _, delta := range []string{"--delta", "--delta=false"} {
		cmd := exec.Command(program, "xds", "watch", "--type", "clusters", "--nack", "no such thing", delta, "--node-id", "prod/x", "--ads-socket", s.ads)
		var out, errs output
		cmd.Stdout, cmd.Stderr = &out, &errs
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		harness.Eventually(t, soon, func() error {
			if ps := a.proxies(); len(ps) != 1 || ps[0].ID != "prod/x" || ps[0].Types["cds"].Nack == nil || ps[0].Types["cds"].Nack.Error != "no such thing" {
				return fmt.Errorf("proxies: %+v", ps)
			}
			if !strings.Contains(out.String(), "prod/shop.Web") {
				return fmt.Errorf("watch printed %q", out.String())
			}
			return nil
		})
		if table := a.must("proxies"); !strings.Contains(table, "rejected (1 withheld)") || !strings.Contains(table, "no such thing") {
			t.Errorf("proxies: %s", table)
		}
		if held := a.proxies()[0].Types["cds"].Withheld; len(held) != 1 || held[0].Name != "prod/shop.Web" || held[0].Error != "no such thing" {
			t.Errorf("withheld: %+v", held)
		}
		if st := a.status(); st.Nacks != 1 || st.Withheld != 1 {
			t.Errorf("status: %d rejected, %d withheld", st.Nacks, st.Withheld)
		}
		if n := a.metric(`fingerpost_ads_withheld_resources{type="cds"}`); n != "1" {
			t.Errorf("the metric says %s", n)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil || errs.String() != "" {
			t.Errorf("watch ended with %v, %q", err, errs.String())
		}
		harness.Eventually(t, soon, func() error {
			if n := len(a.proxies()); n != 0 {
				return fmt.Errorf("%d proxies are left", n)
			}
			return nil
		})
	}
}

// What a get refuses is printed like anything else.
func TestGetPrintsWhatItRefuses(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	s.start(t, "--source", w.write().source()).ready()
	for _, kind := range []string{"clusters", "endpoints"} {
		for _, delta := range []string{"--delta", "--delta=false"} {
			out, errs, code := run(t, "xds", "get", "--type", kind, "--nack", "no such thing", delta, "--node-id", "prod/"+kind+strings.ReplaceAll(delta, "=", ""), "--ads-socket", s.ads)
			if code != 0 || errs != "" || !strings.Contains(out, "prod/shop.Web") {
				t.Errorf("%s %s: exit %d, %q, %q", kind, delta, code, out, errs)
			}
		}
	}
}

func TestCommandsWithoutAnAgentSaySoInOneLine(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	commands := [][]string{{"status"}, {"status", "--check"}, {"services"}, {"owners"}, {"proxies"}, {"wait", "--service", "shop.Web"}, {"explain", "pod", "prod/a"}, {"explain", "service", "shop.Web"}}
	check := func(text string) {
		t.Helper()
		for _, args := range commands {
			refused(t, 1, text, nil, append(slices.Clone(args), "--admin-socket", s.admin)...)
		}
		for _, delta := range []string{"--delta", "--delta=false"} {
			refused(t, 1, s.ads, nil, "xds", "get", "--type", "clusters", delta, "--ads-socket", s.ads)
			refused(t, 1, s.ads, nil, "xds", "watch", "--type", "clusters", delta, "--ads-socket", s.ads)
		}
	}
	check("no such socket")
	w := newWorld(t)
	s.start(t, "--source", w.write().source()).ready().kill()
	check("nobody answers")
}
