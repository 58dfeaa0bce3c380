package daemonset_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/fingerpost/fingerpost/test/harness"
)

// rendered returns the objects of a kustomization as kubectl apply -k sends
// them, in its order.
func rendered(t *testing.T, dir string) []*unstructured.Unstructured {
	t.Helper()
	// What another program reads go test's cache knows nothing of, so that it
	// would take the results of manifests as they were.
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		_, statErr := os.Stat(path)
		return errors.Join(err, statErr)
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(harness.Tool(t, "kustomize"), "build", dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("kustomize build %s: %v\n%s", dir, err, stderr.String())
	}
	if stderr.Len() > 0 { // of what is deprecated, for example
		t.Errorf("kustomize build %s: %s", dir, stderr.String())
	}
	var list []*unstructured.Unstructured
	for d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatalf("%s: %v", dir, err)
		}
		list = append(list, o)
	}
}

// objects returns those of a kind, decoded strictly, so that a misspelt field
// fails; at least one.
func objects[T any](t *testing.T, dir, kind string) []T {
	t.Helper()
	var list []T
	for _, o := range rendered(t, dir) {
		if o.GetKind() != kind {
			continue
		}
		var v T
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &v, true); err != nil {
			t.Fatalf("%s: %s %s: %v", dir, kind, o.GetName(), err)
		}
		list = append(list, v)
	}
	if len(list) == 0 {
		t.Fatalf("%s: no %s", dir, kind)
	}
	return list
}

// names are kind/name of all objects, sorted.
func names(list []*unstructured.Unstructured) []string {
	var all []string
	for _, o := range list {
		all = append(all, o.GetKind()+"/"+o.GetName())
	}
	slices.Sort(all)
	return all
}

const (
	base       = "base"
	kind       = "overlays/kind"
	production = "overlays/production"
)
