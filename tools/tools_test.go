package tools_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/tools"
)

func TestVersionsAreThoseOfTheModuleFiles(t *testing.T) {
	for _, tool := range tools.All() {
		file, want := filepath.Join(tool.Module, "go.mod"), tool.Version
		switch tool.Name {
		case "envoy":
			file, want = filepath.Join(tool.Module, "requirements.txt"), "=="+tool.Version
		case tools.GrpcJS:
			file, want = filepath.Join(tool.Module, "package.json"), `"@grpc/grpc-js": "`+tool.Version+`"`
		case tools.GrpcJSXDS:
			file, want = filepath.Join(tool.Module, "package.json"), `"@grpc/grpc-js-xds": "`+tool.Version+`"`
		case tools.GrpcJava:
			file, want = filepath.Join(tool.Module, "pom.xml"), "<version>"+tool.Version+"</version>"
		case tools.Tonic:
			library, _, _ := strings.Cut(tool.Version, "+")
			file, want = filepath.Join(tool.Module, "Cargo.toml"), `tonic = { version = "=`+library+`"`
		case tools.Grpcio:
			continue // whichever Debian has
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), want) {
			t.Errorf("%s: %s does not pin %s", tool.Name, file, want)
		}
		if tool.Package != "" && tool.Package != "." && !strings.Contains(string(text), tool.Package+"\n") {
			t.Errorf("%s: %s has no tool directive for %s", tool.Name, file, tool.Package)
		}
	}
}

func TestPathFollowsTheEnvironment(t *testing.T) {
	t.Setenv(tools.DirEnv, "/somewhere")
	t.Setenv(tools.EnvoyEnv, "")
	if got, err := tools.Path("envoy"); err != nil || got != "/somewhere/envoy-1.40.0/envoy" {
		t.Errorf("Path(envoy) = %q, %v", got, err)
	}
	t.Setenv(tools.EnvoyEnv, "/opt/envoy")
	if got, err := tools.Path("envoy"); err != nil || got != "/opt/envoy" {
		t.Errorf("Path(envoy) with %s = %q, %v", tools.EnvoyEnv, got, err)
	}
	t.Setenv(tools.DirEnv, "")
	t.Setenv("XDG_CACHE_HOME", "/caches")
	if got, err := tools.Path("etcd"); err != nil || !strings.HasPrefix(got, "/caches/fingerpost/etcd-v") {
		t.Errorf("Path(etcd) = %q, %v", got, err)
	}
	if _, err := tools.Path("nosuch"); !errors.Is(err, tools.ErrUnknown) {
		t.Errorf("Path(nosuch) gave %v, want ErrUnknown", err)
	}
}
