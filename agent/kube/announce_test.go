package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

func announcedKey(i int) string { return fmt.Sprintf("sha256:%064x", i) }

var announced = kube.FormatPeer(9642, announcedKey(7))

// announcing is an agent that announces itself on a pod of the API server.
type announcing struct {
	*testing.T
	api       *harness.APIServer
	ns        string
	config    *rest.Config
	announcer *kube.Announcer

	// mu guards states.
	mu     sync.Mutex
	states []string
}

func newAnnouncing(t *testing.T, config func(api *harness.APIServer, ns string) *rest.Config) *announcing {
	x := &announcing{T: t, api: harness.StartAPIServer(t)}
	x.ns = x.api.Namespace(t)
	x.config = rest.CopyConfig(x.api.Config)
	if config != nil {
		x.config = config(x.api, x.ns)
	}
	t.Cleanup(func() { harness.CloseIdleConnections(x.config) })
	var err error
	x.announcer, err = kube.NewAnnouncer(x.config, kube.AnnouncerOptions{Namespace: x.ns, Pod: "agent", Node: "n1", Text: announced, State: func(err error) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.states = append(x.states, fmt.Sprint(err))
	}})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func (x *announcing) pod(node string) *corev1.Pod {
	x.Helper()
	pod := x.api.CreatePod(x.T, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: x.ns, Name: "agent", Labels: map[string]string{"app": "fingerpost"}, Annotations: map[string]string{"other": "stays"}},
		Spec:       corev1.PodSpec{NodeName: node},
	})
	return x.api.SetReady(x.T, pod, true, "192.0.2.1")
}

func (x *announcing) annotations() map[string]string {
	x.Helper()
	pod, err := x.api.Client.CoreV1().Pods(x.ns).Get(x.Context(), "agent", metav1.GetOptions{})
	if err != nil {
		x.Fatal(err)
	}
	return pod.Annotations
}

// last waits until the state that was told last has the text.
func (x *announcing) last(text string) {
	x.Helper()
	eventually(x.T, func() string {
		x.mu.Lock()
		defer x.mu.Unlock()
		if n := len(x.states); n == 0 || !strings.Contains(x.states[n-1], text) {
			return fmt.Sprintf("states %q, want %q", x.states, text)
		}
		return ""
	})
}

func (x *announcing) run() {
	done := make(chan struct{})
	ctx := x.Context()
	go func() { x.announcer.Run(ctx); close(done) }()
	x.Cleanup(func() { <-done })
}

func TestAgentAnnouncesItselfOnItsPodAndAgainWhereThatIsLost(t *testing.T) {
	x := newAnnouncing(t, nil)
	x.pod("n1")
	store := kube.NewStore(nodecache.New(nodecache.Options{}), nil)
	agents := store.FollowAgents(x.ns)
	source, err := kube.NewCluster(x.config, "test", store, nil)
	if err != nil {
		t.Fatal(err)
	}
	run(t, source)
	x.run()
	go func() {
		for {
			select {
			case <-agents.Changed():
				if pods, told := agents.Take()["n1"]; told {
					x.announcer.Seen(pods)
				}
			case <-t.Context().Done():
				return
			}
		}
	}()
	has := func() string {
		got := x.annotations()
		if got[kube.PeerAnnotation] != announced || got["other"] != "stays" {
			return fmt.Sprintf("annotations %v", got)
		}
		if !x.announcer.SeenRight() {
			return "the watch has not shown it"
		}
		return ""
	}
	eventually(t, has)
	for _, patch := range []string{
		fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, kube.PeerAnnotation),
		fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, kube.PeerAnnotation, kube.FormatPeer(9642, announcedKey(8))),
		fmt.Sprintf(`{"metadata":{"annotations":{%q:"nonsense"}}}`, kube.PeerAnnotation),
	} {
		if _, err := x.api.Client.CoreV1().Pods(x.ns).Patch(t.Context(), "agent", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() string {
			if x.announcer.SeenRight() {
				return "the watch has not shown the change" // or it is mended already
			}
			return ""
		})
		eventually(t, has)
	}
	x.last("<nil>")
}

// beforePatch does something between the look at the pod and the patch.
type beforePatch struct {
	once func()
	next http.RoundTripper
}

func (b *beforePatch) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPatch {
		b.once()
	}
	return b.next.RoundTrip(r)
}

func TestAnnouncementNeverReachesAnotherPodOfTheName(t *testing.T) {
	var x *announcing
	var made types.UID
	x = newAnnouncing(t, func(api *harness.APIServer, ns string) *rest.Config {
		config := rest.CopyConfig(api.Config)
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return &beforePatch{sync.OnceFunc(func() {
				pod, err := api.Client.CoreV1().Pods(ns).Get(t.Context(), "agent", metav1.GetOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				api.Remove(t, pod)
				made = x.pod("n2").UID
			}), next}
		})
		return config
	})
	x.pod("n1")
	if err := x.announcer.Announce(t.Context()); err == nil {
		t.Error("the patch was accepted")
	}
	if got := x.annotations(); got[kube.PeerAnnotation] != "" || made == "" {
		t.Errorf("the other pod has %v", got)
	}
	if err := x.announcer.Announce(t.Context()); !errors.Is(err, kube.ErrNotOwnPod) {
		t.Errorf("a pod of another node: %v", err)
	}
	if got := x.annotations(); got[kube.PeerAnnotation] != "" {
		t.Errorf("the pod of another node has %v", got)
	}
}

func TestAgentWithoutTheRightToAnnounceSaysSoAndTriesAgain(t *testing.T) {
	const user = "system:serviceaccount:fingerpost:fingerpost"
	grant := func(api *harness.APIServer, ns string, verbs ...string) {
		role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: strings.Join(verbs, "-")}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: verbs}}}
		if _, err := api.Client.RbacV1().Roles(ns).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		bind := &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}},
		}
		if _, err := api.Client.RbacV1().RoleBindings(ns).Create(t.Context(), bind, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	x := newAnnouncing(t, func(api *harness.APIServer, ns string) *rest.Config {
		grant(api, ns, "get")
		config := rest.CopyConfig(api.Config)
		config.Impersonate.UserName = user
		return config
	})
	x.run()
	x.last("not found")
	x.pod("n1")
	x.last("no right to write the annotation")
	grant(x.api, x.ns, "patch")
	x.last("<nil>")
	if got := x.annotations(); got[kube.PeerAnnotation] != announced {
		t.Errorf("annotations %v", got)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if slices.ContainsFunc(x.states, func(s string) bool { return strings.ContainsAny(s, "\n") }) {
		t.Errorf("a state of several lines: %q", x.states)
	}
}
