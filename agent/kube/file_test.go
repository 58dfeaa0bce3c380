package kube_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

// podYAML is a pod that serves, as a YAML document.
func podYAML(name, uid, ip string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: prod, uid: %s}
status:
  phase: Running
  podIP: %s
  conditions: [{type: Ready, status: "True"}]
`, name, uid, ip)
}

type fileFixture struct {
	store *kube.Store
	path  string
	dir   *nodecache.Directory
	log   *lines
	src   *kube.File
}

func newFile(path string) *fileFixture {
	x := &fileFixture{path: path, dir: nodecache.New(nodecache.Options{}), log: &lines{}}
	log := slog.New(x.log)
	x.store = kube.NewStore(x.dir, log)
	x.src = kube.NewFile(path, x.store, log)
	return x
}

func (x *fileFixture) wait(t *testing.T, want ...string) {
	t.Helper()
	eventually(t, func() string {
		if got := served(x.dir); !slices.Equal(got, want) {
			return fmt.Sprintf("%q, want %q; %+v", got, want, x.src.Status())
		}
		if e := x.src.Status().Error; e != "" {
			return e
		}
		return ""
	})
}

func TestDumpsGiveTheOwnersAndStatesThatWereCounted(t *testing.T) {
	type fact struct {
		Pods                      int
		Serving, Draining, Owners map[string]int
	}
	var facts map[string]fact
	text, err := os.ReadFile("testdata/cluster-dumps/facts.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &facts); err != nil {
		t.Fatal(err)
	}
	// One source sees all dumps, one after another.
	x := newFile(filepath.Join(t.TempDir(), "world.yaml"))
	for i, dump := range []string{"steady", "rollout", "drain", "steady"} {
		world, err := os.ReadFile("testdata/cluster-dumps/" + dump + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		replace(t, x.path, string(world))
		if i == 0 {
			run(t, x.src)
			waitSynced(t, x.src)
		}
		eventually(t, func() string {
			got := fact{Pods: x.src.Status().Pods, Serving: map[string]int{}, Draining: map[string]int{}, Owners: map[string]int{}}
			for _, o := range x.dir.Owners() {
				got.Owners[o.Workload.Namespace]++
				for _, p := range o.Pods {
					switch p.State {
					case nodecache.Serving:
						got.Serving[p.Namespace]++
					case nodecache.Draining:
						got.Draining[p.Namespace]++
					}
				}
			}
			if got, want := fmt.Sprint(got), fmt.Sprint(facts[dump]); got != want {
				return fmt.Sprintf("%s: got %s, want %s", dump, got, want)
			}
			return ""
		})
		st := x.src.Status()
		if len(st.Ignored) != 0 || st.Error != "" {
			t.Errorf("%s: status %+v", dump, st)
		}
	}
	if got := x.log.get(); len(got) != 0 {
		t.Errorf("logged %q", got)
	}
}

func TestFileEditsAreFollowed(t *testing.T) {
	a, b := podYAML("a", "ua", "192.0.2.1"), podYAML("b", "ub", "192.0.2.2")
	x := newFile(filepath.Join(t.TempDir(), "world.yaml"))
	write(t, x.path, a)
	run(t, x.src)
	waitSynced(t, x.src)
	x.wait(t, "prod/a=192.0.2.1 serving")

	replace(t, x.path, a+b)
	x.wait(t, "prod/a=192.0.2.1 serving", "prod/b=192.0.2.2 serving")

	write(t, x.path, b) // in place
	x.wait(t, "prod/b=192.0.2.2 serving")

	for i, broken := range []string{"", "kind: [", "{", podYAML("c", `""`, "192.0.2.3"), "apiVersion: v1\nitems:\n"} {
		replace(t, x.path, broken)
		eventually(t, func() string {
			if st := x.src.Status(); st.Error == "" || st.Since.IsZero() || !strings.Contains(st.Error, x.path) {
				return fmt.Sprintf("broken edit %d: %+v", i, st)
			}
			return ""
		})
		if got := served(x.dir); !slices.Equal(got, []string{"prod/b=192.0.2.2 serving"}) {
			t.Errorf("broken edit %d: %q", i, got)
		}
		replace(t, x.path, b)
		x.wait(t, "prod/b=192.0.2.2 serving")
	}

	if err := os.Remove(x.path); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if x.src.Status().Error == "" {
			return "no error after the file was removed"
		}
		return ""
	})
	if got := served(x.dir); len(got) != 1 {
		t.Errorf("removed file: %q", got)
	}
	write(t, x.path, "items: []\n")
	x.wait(t)
}

func TestBrokenEditIsLoggedOnce(t *testing.T) {
	x := newFile(filepath.Join(t.TempDir(), "world.yaml"))
	write(t, x.path, podYAML("a", "ua", "192.0.2.1"))
	run(t, x.src)
	waitSynced(t, x.src)
	for i := range 3 {
		replace(t, x.path, "kind: [ # "+strings.Repeat("x", i)) // the same error thrice
		eventually(t, func() string {
			if x.src.Status().Error == "" {
				return "no error"
			}
			return ""
		})
	}
	replace(t, x.path, "items: []")
	x.wait(t)
	eventually(t, func() string {
		if got := x.log.get(); len(got) != 2 || !strings.Contains(got[0], "line 1") {
			return fmt.Sprintf("logged %q, want one error and one recovery", got)
		}
		return ""
	})
}

func TestUnchangedPodsCauseNoDirectoryChange(t *testing.T) {
	a, b := podYAML("a", "ua", "192.0.2.1"), podYAML("b", "ub", "192.0.2.2")
	x := newFile(filepath.Join(t.TempDir(), "world.yaml"))
	write(t, x.path, a)
	run(t, x.src)
	waitSynced(t, x.src)
	sub := x.dir.Subscribe()
	defer sub.Close()
	if _, err := sub.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	replace(t, x.path, a+b)
	keys, err := sub.Next(t.Context())
	if err != nil || len(keys) != 1 || keys[0].UID != "ub" {
		t.Errorf("changed %v, %v; want b alone", keys, err)
	}
}

func TestDirectoryIsOneSnapshot(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "world")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	x := newFile(path)
	write(t, filepath.Join(path, "a.yaml"), podYAML("a", "ua", "192.0.2.1"))
	write(t, filepath.Join(path, "README"), "kind: [")
	run(t, x.src)
	waitSynced(t, x.src)
	x.wait(t, "prod/a=192.0.2.1 serving")

	bAndC := `{"kind":"PodList","apiVersion":"v1","items":[
	{"metadata":{"name":"b","namespace":"prod","uid":"ub"},"status":{"podIP":"192.0.2.2","conditions":[{"type":"Ready","status":"True"}]}},
	{"metadata":{"name":"c","uid":"uc"},"status":{"podIP":"192.0.2.3","conditions":[{"type":"Ready","status":"True"}]}}]}`
	write(t, filepath.Join(path, "b.json"), bAndC)
	x.wait(t, "default/c=192.0.2.3 serving", "prod/a=192.0.2.1 serving", "prod/b=192.0.2.2 serving")

	write(t, filepath.Join(path, "c.yml"), podYAML("a", "ud", "192.0.2.4"))
	eventually(t, func() string {
		if e := x.src.Status().Error; !strings.Contains(e, "c.yml") || !strings.Contains(e, "a.yaml") || !strings.Contains(e, "prod/a") {
			return "error does not name both places: " + e
		}
		return ""
	})
	if got := served(x.dir); len(got) != 3 {
		t.Errorf("after a broken edit: %q", got)
	}
	if err := os.Remove(filepath.Join(path, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	x.wait(t, "default/c=192.0.2.3 serving", "prod/a=192.0.2.4 serving", "prod/b=192.0.2.2 serving")

	// The directory itself is replaced.
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(path, "e.yaml"), podYAML("e", "ue", "192.0.2.5"))
	x.wait(t, "prod/e=192.0.2.5 serving")
	write(t, filepath.Join(path, "e.yaml"), podYAML("e", "ue", "192.0.2.6"))
	x.wait(t, "prod/e=192.0.2.6 serving")
}

func TestConfigMapVolumeIsFollowed(t *testing.T) {
	for _, whole := range []bool{true, false} {
		t.Run(fmt.Sprintf("whole volume %t", whole), func(t *testing.T) {
			root := t.TempDir()
			turn := func(version, text string) {
				dir := filepath.Join(root, "..v"+version)
				if err := os.Mkdir(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				write(t, filepath.Join(dir, "world.yaml"), text)
				tmp := filepath.Join(root, "..data_tmp")
				if err := os.Symlink(filepath.Base(dir), tmp); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(tmp, filepath.Join(root, "..data")); err != nil {
					t.Fatal(err)
				}
			}
			turn("1", podYAML("a", "ua", "192.0.2.1"))
			path := filepath.Join(root, "world.yaml")
			if err := os.Symlink("..data/world.yaml", path); err != nil {
				t.Fatal(err)
			}
			if whole {
				path = root
			}
			x := newFile(path)
			run(t, x.src)
			waitSynced(t, x.src)
			x.wait(t, "prod/a=192.0.2.1 serving")
			turn("2", podYAML("a", "ua", "192.0.2.2"))
			x.wait(t, "prod/a=192.0.2.2 serving")
			turn("3", podYAML("a", "ua", "192.0.2.3"))
			x.wait(t, "prod/a=192.0.2.3 serving")
		})
	}
}

func TestTurnedLinkToTheDirectoryIsFollowed(t *testing.T) {
	root := t.TempDir()
	current := filepath.Join(root, "current")
	turn := func(version, ip string) {
		dir := filepath.Join(root, version)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "world.yaml"), podYAML("a", "ua", ip))
		if err := os.Symlink(version, current+".tmp"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(current+".tmp", current); err != nil {
			t.Fatal(err)
		}
	}
	turn("v1", "192.0.2.1")
	x := newFile(filepath.Join(current, "world.yaml"))
	run(t, x.src)
	waitSynced(t, x.src)
	turn("v2", "192.0.2.2")
	x.wait(t, "prod/a=192.0.2.2 serving")
	write(t, filepath.Join(root, "v2", "world.yaml"), podYAML("a", "ua", "192.0.2.3"))
	x.wait(t, "prod/a=192.0.2.3 serving")
}

func TestLoadErrorsSayWhere(t *testing.T) {
	root := t.TempDir()
	empty := filepath.Join(root, "empty")
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	a := podYAML("a", "ua", "192.0.2.1")
	for _, c := range []struct{ name, text, want string }{
		{"empty file", "", "is empty; an empty world is `items: []`"},
		{"only comments", "# nothing\n---\n# more\n", "is empty"},
		{"YAML", a + "---\nkind: Pod\n  metadata: {\n", "line 11: mapping values"},
		{"JSON", "{\"kind\": \"List\",\n\"items\": [}\n", "line 2: "},
		{"cut JSON", `{"kind": "List", "items": [`, "unexpected EOF"},
		{"text", "hello", "document 1: is not a Kubernetes object"},
		{"no kind", "metadata: {name: a}", "document 1: has no kind"},
		{"no UID", a + podYAML("b", "", "192.0.2.2"), "document 2: Pod prod/b has no metadata.uid"},
		{"no name", podYAML("", "ua", "192.0.2.2"), "Pod has no metadata.name"},
		{"same name", a + podYAML("a", "ub", "192.0.2.2"), "document 2: Pod prod/a is there twice"},
		{"same UID", a + podYAML("b", "ua", "192.0.2.2"), "document 2: Pod prod/b has the metadata.uid of Pod prod/a"},
		{"no UID in a list", "items:\n- {kind: Pod, metadata: {name: x}}", "document 1, item 1: Pod default/x has no metadata.uid"},
		{"list without items", "kind: List", "has no items"},
		{"wrong type", "kind: Pod\nmetadata: {name: a, uid: a}\nspec: {hostNetwork: 3}", "document 1: is not a Pod: "},
		{"kubectl's list, cut between items", "apiVersion: v1\nitems:\n- kind: Pod\n  metadata: {name: x, uid: x}\n", "has items and no kind"},
		{"JSON cut behind a good list", `{"kind": "List", "items": []}` + "\n" + `{"kind": "Pod", "metadata": {"name": "q"`, "unexpected EOF"},
		{"text behind JSON", `{"kind": "List", "items": []}` + "\n}}} [[[", "line 2: "},
		{"document behind an end marker", a + "...\nkind: Pod\n", "expected <document start>"},
		{"deep", strings.Repeat(`{"items":[`, 9) + strings.Repeat("]}", 9), "Lists more than 4 deep"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(root, "world.yaml")
			write(t, path, c.text)
			x := newFile(path)
			err := x.src.Load()
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want one line with %q", err, c.want)
			}
			if err := x.src.Run(t.Context()); err == nil {
				t.Error("Run without a good first state returned nil")
			}
			if got := x.log.get(); len(got) != 0 {
				t.Errorf("logged %q", got)
			}
		})
	}
	for path, want := range map[string]string{
		filepath.Join(root, "missing.yaml"): "no such file",
		empty:                               "has no *.yaml",
		"/dev/null":                         "neither a file nor a directory",
	} {
		if err := newFile(path).src.Load(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}

func TestKindsAreCounted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "world.yaml")
	write(t, path, "\ufeff# a comment\n--- # first\r\napiVersion: v1\nkind: Service\nmetadata: {name: a}\n---\n"+`
apiVersion: v1
kind: List
items:
- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1}}
- {apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: a}}
- {apiVersion: gateway.networking.k8s.io/v1alpha1, kind: HTTPRoute, metadata: {name: a}}
- {apiVersion: gateway.networking.k8s.io/v1, kind: GRPCRoute, metadata: {name: a}}
- {apiVersion: gateway.networking.k8s.io/v1beta1, kind: ReferenceGrant, metadata: {name: a}}
- {apiVersion: v1, kind: Node, metadata: {name: n1}}
- {apiVersion: example.com/v1, kind: Service}
- {apiVersion: v1, kind: ConfigMap}
- {apiVersion: v1, kind: ConfigMap}
- {apiVersion: v1, kind: ServiceList, items: [{metadata: {name: b}}, {metadata: {name: c}}]}
`)
	x := newFile(path)
	run(t, x.src)
	waitSynced(t, x.src)
	st := x.src.Status()
	ignored := "map[ConfigMap:2 HTTPRoute.gateway.networking.k8s.io:1 Service.example.com:1]"
	if fmt.Sprint(st.Ignored) != ignored || st.Pods != 0 || !st.Synced || st.Kind != "file" {
		t.Errorf("status %+v", st)
	}
	held, _ := x.store.Routes().Counts()
	if got := fmt.Sprint(held); got != "map[GRPCRoute:1 HTTPRoute:1 ReferenceGrant:1]" {
		t.Errorf("objects of the Gateway API: %s", got)
	}
}
