package injection_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/fingerpost/fingerpost/daemonset/injection"
	"github.com/fingerpost/fingerpost/tools"
)

func files(t testing.TB, pattern string) map[string][]byte {
	t.Helper()
	names, err := filepath.Glob(filepath.Join("testdata", pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: %v, %v", pattern, names, err)
	}
	all := map[string][]byte{}
	for _, name := range names {
		if all[name], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// objects decodes a stream as kubectl does, lists taken apart.
func objects(t testing.TB, stream []byte) (list []map[string]any) {
	t.Helper()
	for d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096); ; {
		var o map[string]any
		switch err := d.Decode(&o); {
		case errors.Is(err, io.EOF):
			return list
		case err != nil:
			t.Fatalf("%v\n%s", err, stream)
		case o == nil:
			continue
		}
		if items, ok := o["items"].([]any); ok {
			for _, item := range items {
				list = append(list, item.(map[string]any))
			}
			continue
		}
		list = append(list, o)
	}
}

func TestManifestsAreInjected(t *testing.T) {
	for name, in := range files(t, "inject/*.[yj]*") {
		t.Run(filepath.Base(name), func(t *testing.T) {
			out, outcomes, err := injection.Manifests(in, injection.Options{})
			if err != nil {
				t.Fatal(err)
			}
			golden := strings.Replace(name, "inject/", "injected/", 1)
			if os.Getenv("UPDATE") != "" {
				if err := os.WriteFile(golden, out, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(golden); err != nil || string(want) != string(out) {
				t.Errorf("%s is not what comes out (%v); UPDATE=1 writes it anew:\n%s", golden, err, out)
			}

			again, outcomes2, err := injection.Manifests(out, injection.Options{})
			if err != nil || !bytes.Equal(again, out) {
				t.Errorf("a second pass changes something: %v", err)
			}
			if len(outcomes) != len(outcomes2) {
				t.Errorf("%d workloads, then %d", len(outcomes), len(outcomes2))
			}
			for _, o := range outcomes2 {
				if o.Mode != "" {
					t.Errorf("injected twice: %+v", o)
				}
			}
			nothingIsLost(t, in, out)
		})
	}
}

// nothingIsLost checks that without what was injected the manifests are what they
// were.
func nothingIsLost(t testing.TB, in, out []byte) {
	t.Helper()
	before, after := objects(t, in), objects(t, out)
	if len(before) != len(after) {
		t.Fatalf("%d objects, before %d", len(after), len(before))
	}
	for i := range before {
		strip(after[i])
		was, is := clean(before[i]), clean(after[i])
		if !reflect.DeepEqual(was, is) {
			a, _ := json.Marshal(was)
			b, _ := json.Marshal(is)
			t.Errorf("was\n%s\nis\n%s", a, b)
		}
	}
}

// strip takes out what is injected, wherever it is.
func strip(v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if list, ok := value.([]any); ok {
				v[key] = slices.DeleteFunc(list, func(e any) bool {
					m, ok := e.(map[string]any)
					if !ok {
						return false
					}
					switch m["name"] {
					case injection.Container, injection.Volume, "GRPC_XDS_BOOTSTRAP_CONFIG", "FINGERPOST_POD_NAMESPACE", "FINGERPOST_POD_NAME":
						return true
					}
					return false
				})
			}
			if key == "labels" && value != nil {
				delete(value.(map[string]any), injection.Label)
			}
			strip(value)
		}
	case []any:
		for _, e := range v {
			strip(e)
		}
	}
}

// clean leaves out what is empty or null, and the label.
func clean(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, value := range v {
			if value = clean(value); value != nil && key != injection.Label {
				out[key] = value
			}
		}
		if len(out) > 0 {
			return out
		}
		return nil
	case []any:
		var out []any
		for _, e := range v {
			out = append(out, clean(e))
		}
		if len(out) > 0 {
			return out
		}
		return nil
	}
	return v
}

func TestDocumentsWithoutWorkloadComeOutByteForByte(t *testing.T) {
	in := files(t, "inject/as-found.yaml")[filepath.Join("testdata", "inject", "as-found.yaml")]
	out, _, err := injection.Manifests(in, injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{
		"# What people have: comments, aliases, their own init containers, odd spacing.\n---\napiVersion: v1\nkind: Service\n" +
			"metadata:   {  name: web  }\nspec:\n    ports:\n        -   port: 80     # untouched\n---\n\n# only a comment\n\n--- # another one\n",
		"metadata: {name: unknown}\nspec: {template: {spec: {containers: [{name: app, image: app}]}}}\n",
		"metadata: {name: patch}\nspec: {replicas: 5}\n",
	} {
		if !bytes.Contains(in, []byte(part)) || !bytes.Contains(out, []byte(part)) {
			t.Errorf("lost:\n%s", part)
		}
	}
	for _, in := range []string{"", "\n", "---\n", "# x\n---\n...\n", "%YAML 1.1\n# c\n---\nkind: X\n", "kind: ConfigMap\r\n---\r\nkind: Secret", "- a\n- b\n", "text", `{"a":1} {"b":2}`, "\ufeffkind: X\n"} {
		if out, _, err := injection.Manifests([]byte(in), injection.Options{}); err != nil || string(out) != in {
			t.Errorf("%q: %q, %v", in, out, err)
		}
	}
}

func TestADocumentMayBeginOnTheLineOfItsMarker(t *testing.T) {
	in := "--- # one\na: b\n--- {apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: app, image: app}]}}\n--- {c: d}\n"
	out, outcomes, err := injection.Manifests([]byte(in), injection.Options{})
	if err != nil || len(outcomes) != 1 || outcomes[0].Document != 2 {
		t.Fatalf("%+v, %v", outcomes, err)
	}
	if s := string(out); !strings.HasPrefix(s, "--- # one\na: b\n--- \n{") || !strings.HasSuffix(s, "}\n--- {c: d}\n") {
		t.Errorf("%s", s)
	}
}

func TestAnAliasIsNotChangedWithItsAnchor(t *testing.T) {
	in := "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec:\n  template:\n    metadata:\n      labels: &l {app: d}\n" +
		"    spec: {containers: [{name: app, image: app}]}\n  selector: {matchLabels: *l}\n"
	out, _, err := injection.Manifests([]byte(in), injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	spec := objects(t, out)[0]["spec"].(map[string]any)
	if got := spec["selector"].(map[string]any)["matchLabels"]; !reflect.DeepEqual(got, map[string]any{"app": "d"}) {
		t.Errorf("the selector is %v", got)
	}
}

func TestRefusedManifestsSayWhatWhereAndPrintNothing(t *testing.T) {
	for name, in := range files(t, "refuse/*.yaml") {
		line, _, _ := strings.Cut(string(in), "\n")
		want := strings.TrimPrefix(line, "# want: ")
		out, outcomes, err := injection.Manifests(in, injection.Options{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "document ") {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		if out != nil || outcomes != nil {
			t.Errorf("%s: something is returned: %s", name, out)
		}
	}
}

func TestOptionsThatMakeNoSenseAreRefused(t *testing.T) {
	for want, o := range map[string]injection.Options{
		`mode "x" is not`:   {Mode: "x"},
		`image "a b"`:       {Image: "a b"},
		"port 15002 is the": {EgressPort: injection.ReadyPort},
	} {
		if _, _, err := injection.Manifests([]byte("a: b"), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if _, err := injection.Policies(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestOptionsDecideForPodsWithoutLabel(t *testing.T) {
	in := "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: app, image: app, ports: [{containerPort: 15001}]}]}\n"
	out, _, err := injection.Manifests([]byte(in), injection.Options{Image: "mine:1", EgressPort: 16001})
	if err != nil {
		t.Fatal(err)
	}
	if c := injectedPod(t, out).Spec.InitContainers[0]; c.Image != "mine:1" || c.Name != injection.Container {
		t.Errorf("%+v", c)
	}
	if out, _, err = injection.Manifests([]byte(in), injection.Options{Mode: injection.GRPC}); err != nil {
		t.Fatal(err)
	}
	p := injectedPod(t, out)
	if len(p.Spec.InitContainers) != 0 || p.Spec.Containers[0].Env[2].Name != "GRPC_XDS_BOOTSTRAP_CONFIG" || p.Labels[injection.Label] != injection.GRPC {
		t.Errorf("%s", out)
	}
}

func injectedPod(t testing.TB, stream []byte) (p corev1.Pod) {
	t.Helper()
	text, err := json.Marshal(objects(t, stream)[0])
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSidecarIsFirstNativeAndUnprivileged(t *testing.T) {
	out, _, err := injection.Manifests([]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {initContainers: [{name: first, image: a}], containers: [{name: app, image: a}]}"), injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	spec := injectedPod(t, out).Spec
	c := spec.InitContainers[0]
	if c.Name != injection.Container || c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Errorf("the first init container is %+v", c)
	}
	sc := c.SecurityContext
	if *sc.RunAsUser != injection.UID || *sc.RunAsGroup != injection.UID || !*sc.RunAsNonRoot || !*sc.ReadOnlyRootFilesystem || *sc.AllowPrivilegeEscalation || *sc.Privileged ||
		!slices.Equal(sc.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(sc.Capabilities.Add) != 0 || sc.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("it may do too much: %+v", sc)
	}
	if len(c.VolumeMounts) != 1 || !c.VolumeMounts[0].ReadOnly || c.VolumeMounts[0].SubPath != "" || c.VolumeMounts[0].MountPath != "/run/fingerpost" {
		t.Errorf("it has the mounts %+v", c.VolumeMounts)
	}
	// With Directory the pod would not start before the agent.
	if v := spec.Volumes[0]; v.HostPath == nil || v.HostPath.Path != "/run/fingerpost" || *v.HostPath.Type != corev1.HostPathDirectoryOrCreate {
		t.Errorf("the volume is %+v", v)
	}
}

func TestDefaultImageIsTheEnvoyOfTheTests(t *testing.T) {
	envoy, err := tools.Find("envoy")
	if err != nil || !strings.HasSuffix(injection.DefaultImage, "-v"+envoy.Version) {
		t.Errorf("%s, tested is %s (%v)", injection.DefaultImage, envoy.Version, err)
	}
}

// sound checks what holds of any input: an error comes alone, without an
// injection the output is the input, and a second pass changes nothing.
func sound(t *testing.T, in []byte) {
	t.Helper()
	out, outcomes, err := injection.Manifests(in, injection.Options{})
	if err != nil {
		if out != nil || outcomes != nil {
			t.Fatalf("an error and output, of\n%q", in)
		}
		return
	}
	if !slices.ContainsFunc(outcomes, func(o injection.Outcome) bool { return o.Mode != "" }) && !bytes.Equal(in, out) {
		t.Fatalf("nothing is injected, and\n%q\ncomes out as\n%q", in, out)
	}
	again, _, err := injection.Manifests(out, injection.Options{})
	if err != nil || !bytes.Equal(again, out) {
		t.Fatalf("of\n%q\na second pass makes (%v) of\n%q\nthis:\n%q", in, err, out, again)
	}
}

func seeds(t testing.TB) (all [][]byte) {
	for _, pattern := range []string{"inject/*.[yj]*", "refuse/*.yaml"} {
		list := files(t, pattern)
		for _, name := range slices.Sorted(maps.Keys(list)) {
			all = append(all, list[name])
		}
	}
	for _, s := range []string{
		"a: &a [*a]", "<<: {}\n", "? {a: b}\n: c", `{"apiVersion":"v1","kind":"Pod","spec":{"containers":[{}]}}`,
		"---x\n--- |\n  t\n", "kind: List\nitems: {}", "apiVersion: v1\nkind: Pod\nspec: &s\n  containers: [{name: a}]\n  <<: *s\n",
	} {
		all = append(all, []byte(s))
	}
	return all
}

func FuzzManifests(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(sound)
}

// TestBrokenManifestsAreNotMadeWorse is the fuzz test for every day: lines and
// bytes of manifests moved, doubled, lost and changed, the same ones each time.
func TestBrokenManifestsAreNotMadeWorse(t *testing.T) {
	all := seeds(t)
	r := rand.New(rand.NewPCG(1, 2))
	rounds := 2000
	if testing.Short() {
		rounds = 1000
	}
	const odd = "&*<>{}[]:-|!%@#'\"\\\t \r\n.?,0a\x00\xff"
	for range rounds {
		text := slices.Clone(all[r.IntN(len(all))])
		for range 1 + r.IntN(4) {
			lines := bytes.SplitAfter(text, []byte("\n"))
			i, j := r.IntN(len(lines)), r.IntN(len(lines))
			switch at := r.IntN(len(text) + 1); r.IntN(7) {
			case 0:
				lines = slices.Delete(lines, i, i+1)
				text = bytes.Join(lines, nil)
			case 1:
				text = bytes.Join(slices.Insert(lines, i, lines[j]), nil)
			case 2:
				lines[i], lines[j] = lines[j], lines[i]
				text = bytes.Join(lines, nil)
			case 3:
				text = slices.Insert(text, at, odd[r.IntN(len(odd))])
			case 4:
				if at < len(text) {
					text[at] = odd[r.IntN(len(odd))]
				}
			case 5:
				text = text[:at]
			case 6:
				lines[i] = append([]byte("  "), lines[i]...)
				text = bytes.Join(lines, nil)
			}
		}
		sound(t, text)
	}
}
