package bootstrap_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	fp "github.com/fingerpost/fingerpost/xds/bootstrap"
)

func TestOptionsThatMakeNoSenseAreNamed(t *testing.T) {
	long := "/" + strings.Repeat("d", 100)
	for want, o := range map[string]fp.Options{
		`node id "a" is not <namespace>/<pod name>`: {NodeID: "a"},
		`node id ""`:                      {},
		`node id "Prod/a"`:                {NodeID: "Prod/a"},
		`"ads.sock" is not absolute`:      {NodeID: "prod/a", ADSSocket: "ads.sock"},
		"has 110 bytes, at most 107":      {NodeID: "prod/a", ADSSocket: long + "/ads.sock"},
		"unknown.sock\" has 109 bytes":    {NodeID: "prod/a", ADSSocket: long[:96] + "/a.sock"},
		`"a.sock" is not absolute`:        {NodeID: "prod/a", AdminSocket: "a.sock"},
		`"pod" is not an IP address`:      {NodeID: "prod/a", ReadyAddress: "pod", ReadyPort: 1},
		"needs a ready port":              {NodeID: "prod/a", ReadyAddress: fp.PodAddress},
		"socket path \"@":                 {NodeID: "prod/a", ADSSocket: "@ads"},
		`clusters "some" is not all or`:   {NodeID: "prod/a", Clusters: "some"},
		`api "rest" is not delta or sotw`: {NodeID: "prod/a", API: "rest"},
		fp.ErrSotWOnDemand.Error():        {NodeID: "prod/a", API: "sotw", Clusters: "on-demand"},
	} {
		for _, write := range []func(fp.Options) ([]byte, error){fp.Envoy, fp.GRPC} {
			if _, err := write(o); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %v, want %q", o, err, want)
			}
		}
	}
	if _, err := fp.Envoy(fp.Options{NodeID: "prod/a", API: "sotw", Clusters: "on-demand"}); !errors.Is(err, fp.ErrSotWOnDemand) {
		t.Errorf("%v, want ErrSotWOnDemand", err)
	}
}

func TestBootstrapIsTheSameEachTime(t *testing.T) {
	first, err := fp.Envoy(fp.Options{NodeID: "prod/a"})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if b, _ := fp.Envoy(fp.Options{NodeID: "prod/a"}); string(b) != string(first) {
			t.Fatalf("differs:\n%s\n%s", first, b)
		}
	}
	golden := filepath.Join("testdata", "envoy.yaml")
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(golden, first, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(golden); err != nil || string(want) != string(first) {
		t.Errorf("%s is not what is written (%v); UPDATE=1 writes it anew", golden, err)
	}
}

func TestBootstrapForAPodsSpecIsFilledInByTheKubelet(t *testing.T) {
	o := fp.Options{NodeID: fp.PodNodeID, AdminSocket: "@admin", ReadyAddress: fp.PodAddress, ReadyPort: 15002}
	text, err := fp.EnvoyJSON(o)
	if err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("$("+fp.EnvPodNamespace+")", "prod", "$("+fp.EnvPodName+")", "a-1", "$("+fp.EnvPodAddress+")", "fd00::7")
	filled := fill.Replace(string(text))
	if strings.Contains(filled, "$") || strings.Contains(filled, "\n") {
		t.Errorf("%s", filled)
	}
	// The same as for a pod that is known.
	o.NodeID, o.ReadyAddress = "prod/a-1", "fd00::7"
	if want, err := fp.EnvoyJSON(o); err != nil || string(want) != filled {
		t.Errorf("%s\nwant (%v)\n%s", filled, err, want)
	}
	program, err := fp.GRPC(fp.Options{NodeID: fp.PodNodeID})
	if err != nil {
		t.Fatal(err)
	}
	if want, err := fp.GRPC(fp.Options{NodeID: "prod/a-1"}); err != nil || string(want) != fill.Replace(string(program)) {
		t.Errorf("%s\nwant (%v)\n%s", program, err, want)
	}
}

func TestGRPCBootstrapNamesSocketAndNode(t *testing.T) {
	text, err := fp.GRPC(fp.Options{NodeID: "prod/a"})
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		XDSServers []struct {
			ServerURI string `json:"server_uri"`
		} `json:"xds_servers"`
		Node struct {
			ID       string            `json:"id"`
			Metadata map[string]string `json:"metadata"`
			Locality *struct{}         `json:"locality"`
		} `json:"node"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	if doc.XDSServers[0].ServerURI != "unix:///run/fingerpost/ads.sock" || doc.Node.ID != "prod/a" || doc.Node.Metadata["fingerpost.dev/shape"] != "2" || doc.Node.Locality == nil {
		t.Errorf("%s", text)
	}
}
