package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/fingerpost/fingerpost/test/harness"
)

// standing waits until the status of a route says so, as "type=status/reason".
func (c *cluster) standing(routes dynamic.ResourceInterface, name string, want ...string) *unstructured.Unstructured {
	c.t.Helper()
	var o *unstructured.Unstructured
	harness.Eventually(c.t, soon, func() (err error) {
		if o, err = routes.Get(c.t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		var got []string
		parents, _, _ := unstructured.NestedSlice(o.Object, "status", "parents")
		for _, p := range parents {
			conditions, _, _ := unstructured.NestedSlice(p.(map[string]any), "conditions")
			for _, cond := range conditions {
				cond := cond.(map[string]any)
				got = append(got, fmt.Sprintf("%s=%s/%s", cond["type"], cond["status"], cond["reason"]))
			}
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("route %s says %q, want %q", name, got, want)
		}
		return nil
	})
	return o
}

// With the rights of the DaemonSet one of two agents says how routes stand. One
// that may not any more says so, and serves on.
func TestOneAgentSaysHowRoutesStand(t *testing.T) {
	c := newCluster(t)
	crds := harness.GatewayCRDs(t)
	c.InstallCRDs(t, crds...)
	t.Cleanup(func() { c.RemoveCRDs(t, crds...) })
	a := c.reporter("n1")
	a.reports("on: writer")
	b := c.reporter("n2")
	b.reports("on: follower of n1-")
	routes := c.Dynamic(t).Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "grpcroutes"}).Namespace(c.ns)
	create := func(name string) {
		t.Helper()
		if _, err := routes.Create(t.Context(), grpcRoute(c.ns, name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	create("r")
	c.standing(routes, "r", "Accepted=False/NoMatchingParent", "ResolvedRefs=False/BackendNotFound")
	said := []string{
		"Warning RefsNotResolved GRPCRoute/r x1: BackendNotFound: rule 0, backend 0: there is no Service " + c.ns + "/web: create it, or correct backendRefs. Their share of the calls fails",
		"Warning RouteNotAccepted GRPCRoute/r x1: under Service " + c.ns + "/web: NoMatchingParent: there is no Service " + c.ns + "/web: create it, or correct parentRefs",
	}
	c.says(said...)
	_, err := c.Client.CoreV1().Services(c.ns).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "api", Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	settled := c.standing(routes, "r", "Accepted=True/Accepted", "ResolvedRefs=True/ResolvedRefs")

	// Another is elected, and finds that the right has gone.
	role, err := c.Client.RbacV1().ClusterRoles().Get(t.Context(), "fingerpost-reports", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	full := role.DeepCopy()
	role.Rules = slices.DeleteFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "grpcroutes/status") })
	if _, err := c.Client.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	grant := func(ctx context.Context) error {
		full.ResourceVersion = ""
		_, err := c.Client.RbacV1().ClusterRoles().Update(ctx, full, metav1.UpdateOptions{})
		return err
	}
	t.Cleanup(func() {
		if err := grant(context.Background()); err != nil { // for the tests to come
			t.Error(err)
		}
	})
	harness.Eventually(t, soon, func() error { // the authorizer hears of it by a watch
		review, err := c.Client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: "system:serviceaccount:fingerpost:fingerpost", ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: c.ns, Verb: "patch", Group: "gateway.networking.k8s.io", Resource: "grpcroutes", Subresource: "status", Name: "s",
			}},
		}, metav1.CreateOptions{})
		if err != nil || review.Status.Allowed {
			return fmt.Errorf("still allowed: %v", err)
		}
		return nil
	})
	a.stop()
	b.stop()
	b = c.reporter("n2") // is elected at once
	create("s")
	b.reports("off: statuses of routes cannot be written: grpcroutes.gateway.networking.k8s.io \"s\" is forbidden")
	c.declared("web-1-a", "50051=shop.v1.Cart")
	b.providedIn(c.ns, "shop.v1.Cart", "web-1-a, 0 claimants")
	b.ready()
	if err := grant(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.standing(routes, "s", "Accepted=True/Accepted", "ResolvedRefs=True/ResolvedRefs")
	b.reports("on: writer")
	b.counts(`fingerpost_route_statuses_total{result="written"}`, "1")
	if o, err := routes.Get(t.Context(), "r", metav1.GetOptions{}); err != nil || o.GetResourceVersion() != settled.GetResourceVersion() {
		t.Errorf("the status of r was written again: %v", err)
	}
	c.says(said...)
	if n := strings.Count(b.log.String(), "reports are not written"); n != 1 {
		t.Errorf("told %d times in the log, want once", n)
	}
}
