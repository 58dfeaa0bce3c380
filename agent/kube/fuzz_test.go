package kube_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func FuzzFile(f *testing.F) {
	for _, seed := range []string{
		"", "items: []", "---\n---", "--- # x\r\n{}", "{", `{"kind":"Pod"}{"kind":"Pod"}`, "\ufeffkind: Pod",
		podYAML("a", "ua", "192.0.2.1") + podYAML("b", "ub", "x"),
		`{"apiVersion":"v1","kind":"PodList","items":[{"metadata":{"name":"a","uid":"u"},"spec":{"containers":[{"ports":[{"name":"grpc","containerPort":-1}]}],"initContainers":[{"restartPolicy":"Always"}]}}]}`,
		"kind: Pod\nmetadata: {name: a, uid: u, annotations: {fingerpost.dev/services: \"1=a;b,=\", fingerpost.dev/grpc-port: \",1\"}}",
		"apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: a}\nspec: {rules: [{matches: [{path: {type: Exact}}]}]}",
		"a: &a [*a]", "kind: Namespace\nmetadata: {name: n, annotations: {fingerpost.dev/collect: \"false\"}}",
	} {
		f.Add([]byte(seed))
	}
	path := filepath.Join(f.TempDir(), "world.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		src := kube.NewFile(path, kube.NewStore(nodecache.New(nodecache.Options{}), nil), nil)
		if err := src.Load(); err != nil && strings.ContainsAny(err.Error(), "\n\r") {
			t.Errorf("error of several lines: %q", err)
		}
	})
}
