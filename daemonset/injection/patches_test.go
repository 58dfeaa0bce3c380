package injection_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/fingerpost/fingerpost/daemonset/injection"
	"github.com/fingerpost/fingerpost/test/harness"
)

// TestKustomizeComponentAddsWhatInjectAdds renders workloads of each kind with the
// component, and without it through Manifests: the pods are the same.
func TestKustomizeComponentAddsWhatInjectAdds(t *testing.T) {
	kustomize := harness.Tool(t, "kustomize")
	dir := t.TempDir()
	workloads := `
apiVersion: v1
kind: Pod
metadata: {name: pod, labels: {fingerpost.dev/inject: envoy}}
spec: {containers: [{name: app, image: app}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: deployment, labels: {fingerpost.dev/inject: envoy}}
spec:
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec: {initContainers: [{name: first, image: app}], containers: [{name: app, image: app}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: statefulset, labels: {fingerpost.dev/inject: envoy}}
spec:
  selector: {matchLabels: {app: b}}
  template:
    metadata: {labels: {app: b}}
    spec: {containers: [{name: app, image: app}]}
---
apiVersion: batch/v1
kind: Job
metadata: {name: job, labels: {fingerpost.dev/inject: envoy}}
spec: {template: {spec: {restartPolicy: Never, containers: [{name: app, image: app}]}}}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: cronjob, labels: {fingerpost.dev/inject: envoy}}
spec: {schedule: "0 3 * * *", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: app, image: app}]}}}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: not}
spec: {template: {metadata: {labels: {fingerpost.dev/inject: "false"}}, spec: {containers: [{name: app, image: app}]}}}
`
	build := func(kustomization string) []byte {
		t.Helper()
		for name, text := range map[string]string{"workloads.yaml": workloads, "kustomization.yaml": kustomization} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(kustomize, "build", dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil || stderr.Len() > 0 {
			t.Fatalf("%v\n%s", err, stderr.String())
		}
		return out
	}
	// A component is named by a relative path.
	if err := os.CopyFS(filepath.Join(dir, "component"), os.DirFS(filepath.Join("..", "components", "injection-patches"))); err != nil {
		t.Fatal(err)
	}
	patched := build("resources: [workloads.yaml]\ncomponents: [component]\n")
	injected, _, err := injection.Manifests(build("resources: [workloads.yaml]\n"), injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := objects(t, patched), objects(t, injected)
	if len(a) != 6 || len(b) != 6 {
		t.Fatalf("%d and %d objects", len(a), len(b))
	}
	for i := range a {
		if !reflect.DeepEqual(a[i], b[i]) {
			x, _ := json.MarshalIndent(a[i], "", " ")
			y, _ := json.MarshalIndent(b[i], "", " ")
			t.Errorf("the component makes\n%s\ninject makes\n%s", x, y)
		}
	}
	if again, _, err := injection.Manifests(patched, injection.Options{}); err != nil || !bytes.Equal(again, patched) {
		t.Errorf("inject changes what is patched already: %v", err)
	}
}

func TestComponentsAreWhatTheCodeWrites(t *testing.T) {
	policies, err := injection.Policies(injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	patches, err := injection.Patches(injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	check := func(dir, name string, want []byte) {
		if got, err := os.ReadFile(filepath.Join("..", "components", dir, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s/%s is not up to date, run go generate ./daemonset/injection (%v)", dir, name, err)
		}
	}
	check("injection", "policy.yaml", policies)
	for name, text := range patches {
		check("injection-patches", name, text)
	}
}
