package e2e_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// cluster is a namespace of a real API server, some of whose pods have a
// server behind them.
type cluster struct {
	*harness.APIServer
	t    *testing.T
	ns   string
	pods []*corev1.Pod
}

func newCluster(t *testing.T) *cluster { return inCluster(t, harness.SharedAPIServer(t)) }

func inCluster(t *testing.T, api *harness.APIServer) *cluster {
	return &cluster{APIServer: api, t: t, ns: api.Namespace(t)}
}

// create makes the pod in the namespace, Ready at the address unless that is
// empty. It is removed with the test, so that agents of later tests do not ask
// it.
func (c *cluster) create(p *corev1.Pod, addr string) *corev1.Pod {
	c.t.Helper()
	p = p.DeepCopy()
	p.Namespace, p.UID, p.Status = c.ns, "", corev1.PodStatus{}
	p = c.CreatePod(c.t, p)
	c.t.Cleanup(func() { c.Remove(c.t, p) })
	if addr != "" {
		p = c.SetReady(c.t, p, true, addr)
	}
	c.pods = append(c.pods, p)
	return p
}

// serve starts a server and creates its Ready pod, as that of a ReplicaSet.
func (c *cluster) serve(id string, services []string, opts ...grpc.ServerOption) (*corev1.Pod, *demo.Sample) {
	c.t.Helper()
	p := newPod(id, "", 0)
	s := sample(c.t, id, portOf(c.pods, p), services, opts...)
	return c.create(newPod(id, "", s.Port()), s.IP()), s
}

// args let an agent watch the API server with the rights of the DaemonSet, and
// no others.
func (c *cluster) args() []string {
	return []string{"--source", "kube", "--kubeconfig", c.kubeconfig()}
}

func (c *cluster) kubeconfig() string {
	t := c.t
	t.Helper()
	exists := func(err error) {
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	const ns = "fingerpost"
	_, err := c.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{})
	exists(err)
	text, err := os.ReadFile("../../daemonset/base/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			t.Fatal(err)
		}
		switch kind.Kind {
		case "ServiceAccount":
			_, err = c.Client.CoreV1().ServiceAccounts(ns).Create(t.Context(), parse[corev1.ServiceAccount](t, doc), metav1.CreateOptions{})
		case "ClusterRole":
			_, err = c.Client.RbacV1().ClusterRoles().Create(t.Context(), parse[rbacv1.ClusterRole](t, doc), metav1.CreateOptions{})
		case "ClusterRoleBinding":
			_, err = c.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), parse[rbacv1.ClusterRoleBinding](t, doc), metav1.CreateOptions{})
		case "Role":
			_, err = c.Client.RbacV1().Roles(ns).Create(t.Context(), parse[rbacv1.Role](t, doc), metav1.CreateOptions{})
		case "RoleBinding":
			_, err = c.Client.RbacV1().RoleBindings(ns).Create(t.Context(), parse[rbacv1.RoleBinding](t, doc), metav1.CreateOptions{})
		default:
			t.Fatalf("daemonset/base/rbac.yaml has a %s, which this test does not make", kind.Kind)
		}
		exists(err)
	}
	hour := int64(3600)
	token, err := c.Client.CoreV1().ServiceAccounts(ns).CreateToken(t.Context(), "fingerpost",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &hour}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.AuthInfos = map[string]*clientcmdapi.AuthInfo{"admin": {Token: token.Status.Token}}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func parse[T any](t *testing.T, doc []byte) *T {
	t.Helper()
	v := new(T)
	if err := yaml.UnmarshalStrict(doc, v); err != nil {
		t.Fatal(err)
	}
	return v
}
