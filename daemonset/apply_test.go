package daemonset_test

import (
	"testing"

	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }

func TestAPIServerAcceptsTheManifests(t *testing.T) {
	c := harness.SharedAPIServer(t).Client
	strict := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	check := func(kind string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	ns := documents[corev1.Namespace](t, "namespace.yaml", "Namespace")[0]
	_, err := c.CoreV1().Namespaces().Create(t.Context(), &ns, strict)
	check("Namespace", err)
	account := documents[corev1.ServiceAccount](t, "rbac.yaml", "ServiceAccount")[0]
	_, err = c.CoreV1().ServiceAccounts(ns.Name).Create(t.Context(), &account, strict)
	check("ServiceAccount", err)
	for _, role := range documents[rbacv1.ClusterRole](t, "rbac.yaml", "ClusterRole") {
		_, err = c.RbacV1().ClusterRoles().Create(t.Context(), &role, strict)
		check("ClusterRole", err)
	}
	for _, binding := range documents[rbacv1.ClusterRoleBinding](t, "rbac.yaml", "ClusterRoleBinding") {
		_, err = c.RbacV1().ClusterRoleBindings().Create(t.Context(), &binding, strict)
		check("ClusterRoleBinding", err)
	}
	for _, role := range documents[rbacv1.Role](t, "rbac.yaml", "Role") {
		_, err = c.RbacV1().Roles(ns.Name).Create(t.Context(), &role, strict)
		check("Role", err)
	}
	for _, binding := range documents[rbacv1.RoleBinding](t, "rbac.yaml", "RoleBinding") {
		_, err = c.RbacV1().RoleBindings(ns.Name).Create(t.Context(), &binding, strict)
		check("RoleBinding", err)
	}
	set := documents[appsv1.DaemonSet](t, "daemonset.yaml", "DaemonSet")[0]
	stored, err := c.AppsV1().DaemonSets(ns.Name).Create(t.Context(), &set, strict)
	check("DaemonSet", err)

	// Defaulting must not have added a port of the host.
	for _, container := range stored.Spec.Template.Spec.Containers {
		if len(container.Ports) != 0 {
			t.Errorf("%s has ports %v", container.Name, container.Ports)
		}
	}
}
