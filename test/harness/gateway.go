package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

var crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// GatewayCRDs returns the CRDs of HTTPRoute, GRPCRoute and ReferenceGrant as
// the version of the Gateway API has them on which the module depends.
func GatewayCRDs(t testing.TB) []*unstructured.Unstructured {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []*unstructured.Unstructured
	for _, resource := range []string{"httproutes", "grpcroutes", "referencegrants"} {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard/gateway.networking.k8s.io_"+resource+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(text, &crd.Object); err != nil {
			t.Fatal(err)
		}
		all = append(all, crd)
	}
	return all
}

// Dynamic returns a client for objects of any kind.
func (s *APIServer) Dynamic(t testing.TB) dynamic.Interface {
	t.Helper()
	client, err := dynamic.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// InstallCRDs creates the CRDs, or replaces those that are there, and returns
// when they are served.
func (s *APIServer) InstallCRDs(t testing.TB, all ...*unstructured.Unstructured) {
	t.Helper()
	client := s.Dynamic(t).Resource(crds)
	for _, crd := range all {
		_, err := client.Create(t.Context(), crd.DeepCopy(), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			var old *unstructured.Unstructured
			if old, err = client.Get(t.Context(), crd.GetName(), metav1.GetOptions{}); err == nil {
				crd = crd.DeepCopy()
				crd.SetResourceVersion(old.GetResourceVersion())
				_, err = client.Update(t.Context(), crd, metav1.UpdateOptions{})
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, crd := range all {
		s.served(t, crd, true)
	}
}

// RemoveCRDs deletes the CRDs with all their objects, and returns when they are
// not served any more. It may be called in a cleanup.
func (s *APIServer) RemoveCRDs(t testing.TB, all ...*unstructured.Unstructured) {
	t.Helper()
	client := s.Dynamic(t).Resource(crds)
	for _, crd := range all {
		if err := client.Delete(context.Background(), crd.GetName(), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, crd := range all {
		s.served(t, crd, false)
	}
}

// served waits until every version that the CRD serves is there, or none is.
func (s *APIServer) served(t testing.TB, crd *unstructured.Unstructured, want bool) {
	t.Helper()
	versions, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	resource, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	if err != nil {
		t.Fatal(err)
	}
	client := s.Dynamic(t)
	for _, v := range versions {
		version, _ := v.(map[string]any)["name"].(string)
		gvr := schema.GroupVersionResource{Group: group, Version: version, Resource: resource}
		err := poll(20*time.Second, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_, err := client.Resource(gvr).List(ctx, metav1.ListOptions{Limit: 1})
			if apierrors.IsNotFound(err) != want {
				return nil
			}
			return errors.Join(err, fmt.Errorf("%s served: want %t", gvr, want))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
