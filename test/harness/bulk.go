package harness

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fingerpost/fingerpost/tools"
)

// NewAPIServer starts a server outside of any test; the caller closes it. What
// needs a testing.TB needs the caller's own.
func NewAPIServer() (*APIServer, error) {
	etcd, err := tools.Path("etcd")
	if err != nil {
		return nil, err
	}
	api, err := tools.Path("kube-apiserver")
	if err != nil {
		return nil, err
	}
	return startAPIServer(etcd, api)
}

// Close stops the server and removes its files.
func (s *APIServer) Close() { s.close() }

// Again is Restart outside of any test. What happened before is not in the
// server's watch caches any more: it refuses a watch from there.
func (s *APIServer) Again() error {
	s.api.kill()
	return s.startAPI()
}

// WritePods writes pods into the API server's etcd as the server itself stores
// them, past admission and validation: thousands a second, with their status.
// The server hears of them by its watch of etcd. A pod must have all that the
// server would have set: a UID above all.
func (s *APIServer) WritePods(ctx context.Context, pods iter.Seq[*corev1.Pod]) error {
	type put struct {
		Key   string `json:"key"`
		Value string `json:"value"`
	}
	type op struct {
		Put put `json:"requestPut"`
	}
	const most = 100 // etcd takes 128 in one transaction, and 1.5 MiB
	var ops []op
	flush := func() error {
		if len(ops) == 0 {
			return nil
		}
		body, err := json.Marshal(map[string]any{"success": ops})
		if err != nil {
			return err
		}
		ops = ops[:0]
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.etcdURL+"/v3/kv/txn", bytes.NewReader(body))
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("etcd: %s: %s", resp.Status, answer)
		}
		return nil
	}
	for pod := range pods {
		raw, err := pod.Marshal()
		if err != nil {
			return err
		}
		stored := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Pod"}, Raw: raw}
		value, err := stored.Marshal()
		if err != nil {
			return err
		}
		ops = append(ops, op{put{
			Key:   base64.StdEncoding.EncodeToString([]byte("/registry/pods/" + pod.Namespace + "/" + pod.Name)),
			Value: base64.StdEncoding.EncodeToString(append([]byte("k8s\x00"), value...)),
		}})
		if len(ops) == most {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}
