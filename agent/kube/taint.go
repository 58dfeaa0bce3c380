package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// StartupTaint is the key of the taint that a node may be registered with, so
// that nothing is scheduled on it before its agent answers.
const StartupTaint = "fingerpost.dev/agent-not-ready"

// taintedNode is what [LiftStartupTaint] reads of a node. A taint is kept as it
// came, with what this release does not know of.
type taintedNode struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		Taints []json.RawMessage `json:"taints"`
	} `json:"spec"`
}

// LiftStartupTaint takes the [StartupTaint] off the node, of each effect, and
// tells whether there was one. The error, of one line, says what is missing;
// where somebody else changed the node meanwhile, trying again helps.
func LiftStartupTaint(ctx context.Context, client rest.Interface, node string) (lifted bool, err error) {
	path := []string{"/api/v1/nodes", node}
	text, err := client.Get().AbsPath(path...).Do(ctx).Raw()
	if err != nil {
		return false, taintError(node, err)
	}
	var n taintedNode
	if err := json.Unmarshal(text, &n); err != nil {
		return false, fmt.Errorf("node %s cannot be read: %w", node, err)
	}
	left := slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(raw json.RawMessage) bool {
		var t corev1.Taint
		return json.Unmarshal(raw, &t) == nil && t.Key == StartupTaint
	})
	if len(left) == len(n.Spec.Taints) {
		return false, nil
	}
	// A merge patch replaces the list; the version refuses it where the list is
	// another by now.
	n.Spec.Taints = left
	patch, err := json.Marshal(n)
	if err != nil {
		return false, err
	}
	if err := client.Patch(types.MergePatchType).AbsPath(path...).Body(patch).Do(ctx).Error(); err != nil {
		return false, taintError(node, err)
	}
	return true, nil
}

func taintError(node string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("no right to take the taint %s off node %s: apply the component startup-taint of the manifests: %s", StartupTaint, node, oneLine(err))
	}
	return fmt.Errorf("taint %s of node %s: %s", StartupTaint, node, oneLine(err))
}
