package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/daemonset/injection"
)

// cluster asks the API server.
type cluster struct {
	*Report
	client *http.Client
	base   *url.URL
	agents string // their namespace
	minor  int    // of the version 1.minor; 0 is unknown
}

// Cluster looks at the cluster. The agents are those of the DaemonSet fingerpost
// in the namespace. The error is that of an API server which cannot be reached.
func Cluster(ctx context.Context, r *Report, config *rest.Config, namespace string) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return err
	}
	c := &cluster{Report: r, client: client, base: base, agents: namespace}
	defer client.CloseIdleConnections()
	if err := c.version(ctx); err != nil {
		return fmt.Errorf("API server %s: %w", base.Host, err)
	}
	r.Cluster = base.Host
	c.apis(ctx)
	c.policies(ctx)
	c.families(ctx)
	c.meshes(ctx)
	installed := c.coverage(ctx)
	c.asking(ctx)
	if installed {
		c.rights(ctx)
	} else {
		r.add("rights of the agents", Note, "there is no DaemonSet "+c.agents+"/fingerpost", "install it: kubectl apply -k daemonset; then check again")
	}
	return nil
}

// apiError is an answer other than 2xx.
type apiError struct {
	code    int
	message string
}

func (e *apiError) Error() string { return e.message }

func code(err error) int {
	var e *apiError
	if errors.As(err, &e) {
		return e.code
	}
	return 0
}

// maxAnswer bounds what is read of one answer, in bytes.
const maxAnswer = 64 << 20

func (c *cluster) ask(ctx context.Context, method, path string, query url.Values, body, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	u := c.base.JoinPath(path)
	u.RawQuery = query.Encode()
	var in io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		in = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), in)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		var s metav1.Status
		if json.Unmarshal(text, &s) != nil || s.Message == "" {
			s.Message = resp.Status
		}
		return &apiError{resp.StatusCode, s.Message}
	}
	return json.Unmarshal(text, into)
}

func (c *cluster) get(ctx context.Context, path string, into any) error {
	return c.ask(ctx, http.MethodGet, path, nil, nil, into)
}

// each calls f for every object of a list, which is read in pages.
func each[T any](ctx context.Context, c *cluster, path, selector string, f func(*T)) error {
	query := url.Values{"limit": {"500"}}
	if selector != "" {
		query.Set("labelSelector", selector)
	}
	for {
		var list struct {
			Metadata metav1.ListMeta
			Items    []T
		}
		if err := c.ask(ctx, http.MethodGet, path, query, nil, &list); err != nil {
			return err
		}
		for i := range list.Items {
			f(&list.Items[i])
		}
		if list.Metadata.Continue == "" {
			return nil
		}
		query.Set("continue", list.Metadata.Continue)
	}
}

func (c *cluster) version(ctx context.Context) error {
	var v struct{ Major, Minor, GitVersion string }
	if err := c.get(ctx, "/version", &v); err != nil {
		return err
	}
	digits := strings.TrimRightFunc(v.Minor, func(r rune) bool { return r < '0' || r > '9' })
	minor, err := strconv.Atoi(digits)
	switch {
	case err != nil || v.Major != "1":
		c.add("native sidecars", Unknown, "Kubernetes "+v.GitVersion, "")
	case minor < 29:
		c.add("native sidecars", Missing, "Kubernetes "+v.GitVersion, "a sidecar is an init container that goes on running (1.29): before, a pod that has one never starts; the mode grpc works")
	default:
		c.add("native sidecars", Good, "Kubernetes "+v.GitVersion, "")
	}
	c.minor = minor
	return nil
}

// serves tells whether the API server has a resource in a version.
func (c *cluster) serves(ctx context.Context, groupVersion, resource string) (bool, error) {
	var list metav1.APIResourceList
	switch err := c.get(ctx, "/apis/"+groupVersion, &list); {
	case code(err) == http.StatusNotFound:
		return false, nil
	case err != nil:
		return false, err
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource }), nil
}

func (c *cluster) apis(ctx context.Context) {
	for _, a := range []struct {
		about, groupVersion, resource string
		without                       State
		means                         string
	}{
		{"EndpointSlices", "discovery.k8s.io/v1", "endpointslices", Missing, "agents do not know which pods are behind a Service"},
		{"HTTPRoutes", "gateway.networking.k8s.io/v1", "httproutes", Note, "there are no such routes to follow; install the CRDs of the Gateway API to have them"},
		{"GRPCRoutes", "gateway.networking.k8s.io/v1", "grpcroutes", Note, "there are no such routes to follow; install the CRDs of the Gateway API to have them"},
		{"ValidatingAdmissionPolicies", "admissionregistration.k8s.io/v1", "validatingadmissionpolicies", Note,
			"from 1.30; before, nobody refuses a pod that must not be injected but fingerpost inject, and nothing keeps an agent from the annotations of another one"},
		{"MutatingAdmissionPolicies", "admissionregistration.k8s.io/v1", "mutatingadmissionpolicies", Note,
			"from 1.36; before, inject by fingerpost inject or by daemonset/components/injection-patches"},
	} {
		switch there, err := c.serves(ctx, a.groupVersion, a.resource); {
		case err != nil:
			c.add(a.about, Unknown, err.Error(), "")
		case there:
			c.add(a.about, Good, a.groupVersion, "")
		default:
			c.add(a.about, a.without, "no "+a.groupVersion, a.means)
		}
	}
}

// policies asks what becomes of pods with the label, without creating one.
func (c *cluster) policies(ctx context.Context) {
	create := func(mode string) (*corev1.Pod, error) {
		p := &corev1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{GenerateName: "fingerpost-check-", Namespace: metav1.NamespaceDefault, Labels: map[string]string{injection.Label: mode}},
			Spec: corev1.PodSpec{
				AutomountServiceAccountToken: new(false),
				Containers:                   []corev1.Container{{Name: "check", Image: "check"}},
			},
		}
		var made corev1.Pod
		return &made, c.ask(ctx, http.MethodPost, "/api/v1/namespaces/"+p.Namespace+"/pods", url.Values{"dryRun": {"All"}}, p, &made)
	}
	const absent = "not there, or not active"
	// No pod may have this value: it is refused, or nobody looks.
	switch _, err := create("check"); {
	case err == nil:
		c.add("refusals", Note, absent, "pods that must not be injected are not refused by the API server: kubectl apply -k with daemonset/components/injection (fingerpost inject refuses them all the same)")
	case strings.Contains(err.Error(), injection.Label):
		c.add("refusals", Good, "the ValidatingAdmissionPolicy "+injection.PolicyName+" is active", "")
	default:
		c.add("refusals", Unknown, err.Error(), "a pod cannot be created here with dryRun")
	}
	switch p, err := create(injection.Envoy); {
	case err == nil && injection.Injected(p):
		c.add("injection", Good, "the MutatingAdmissionPolicy "+injection.PolicyName+" is active", "")
	case err == nil:
		c.add("injection", Note, absent, "a label alone injects nothing: kubectl apply -k with daemonset/components/injection, or fingerpost inject")
	case strings.Contains(err.Error(), "PodSecurity"), strings.Contains(err.Error(), "violates"):
		c.add("injection", Note, err.Error(), "the namespace default takes no pods with a sidecar")
	case strings.Contains(err.Error(), injection.Label), strings.Contains(err.Error(), injection.PolicyName):
		c.add("injection", Missing, err.Error(), "pods with the label are refused: install both policies of daemonset/components/injection")
	default:
		c.add("injection", Unknown, err.Error(), "a pod cannot be created here with dryRun")
	}
}

func (c *cluster) families(ctx context.Context) {
	var s corev1.Service
	if err := c.get(ctx, "/api/v1/namespaces/default/services/kubernetes", &s); err != nil {
		c.add("IP families", Unknown, err.Error(), "")
		return
	}
	var names []string
	for _, f := range s.Spec.IPFamilies {
		names = append(names, string(f))
	}
	c.add("IP families", Good, "the Service kubernetes is "+strings.Join(names, " and "),
		"applications call 127.0.0.1, which every pod has; a listener on ::1 is there for clients that ask for it")
}

// meshes looks for webhooks that inject other sidecars.
func (c *cluster) meshes(ctx context.Context) {
	var found []string
	err := each(ctx, c, "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", "", func(w *struct {
		Metadata metav1.ObjectMeta
		Webhooks []struct{ Name string }
	}) {
		names := w.Metadata.Name
		for _, h := range w.Webhooks {
			names += " " + h.Name
		}
		for _, mesh := range injection.Meshes() {
			if strings.Contains(strings.ToLower(names), strings.ToLower(mesh)) && strings.Contains(names, "inject") {
				found = append(found, fmt.Sprintf("%s (webhook %s)", mesh, w.Metadata.Name))
			}
		}
	})
	switch {
	case err != nil:
		c.add("other meshes", Unknown, reason(err), "")
	case len(found) > 0:
		c.add("other meshes", Note, strings.Join(found, ", "), "a pod takes one sidecar: a pod of theirs that asks for one of ours is refused")
	default:
		c.add("other meshes", Good, "none injects by a webhook", "")
	}
}

// coverage compares nodes with ready agents. It tells whether there are agents.
func (c *cluster) coverage(ctx context.Context) bool {
	var set struct {
		Status struct{ DesiredNumberScheduled int }
	}
	err := c.get(ctx, "/apis/apps/v1/namespaces/"+url.PathEscape(c.agents)+"/daemonsets/fingerpost", &set)
	installed := err == nil
	if err != nil && code(err) != http.StatusNotFound {
		c.add("agents", Unknown, reason(err), "")
		return true
	}
	ready := map[string]bool{}
	err = each(ctx, c, "/api/v1/namespaces/"+url.PathEscape(c.agents)+"/pods", "app.kubernetes.io/name=fingerpost", func(p *corev1.Pod) {
		if slices.ContainsFunc(p.Status.Conditions, func(k corev1.PodCondition) bool { return k.Type == corev1.PodReady && k.Status == corev1.ConditionTrue }) {
			ready[p.Spec.NodeName] = true
		}
	})
	if err != nil {
		c.add("agents", Unknown, reason(err), "")
		return installed
	}
	var nodes, without, windows []string
	kernels := map[string]int{}
	err = each(ctx, c, "/api/v1/nodes", "", func(n *corev1.Node) {
		if n.Status.NodeInfo.OperatingSystem == "windows" || n.Labels[corev1.LabelOSStable] == "windows" {
			windows = append(windows, n.Name)
			return
		}
		nodes = append(nodes, n.Name)
		kernels[n.Status.NodeInfo.KernelVersion]++
		if !ready[n.Name] {
			without = append(without, n.Name)
		}
	})
	switch {
	case err != nil:
		c.add("nodes", Unknown, reason(err), "the agents themselves have no right to read nodes: run this where kubectl works")
		if installed {
			c.add("agents", Good, fmt.Sprintf("%d are ready", len(ready)), "")
		}
		return installed
	case len(ready) == 0 && !installed:
		c.add("agents", Note, fmt.Sprintf("none; %d nodes", len(nodes)), "pods that are injected now wait for an agent")
	case len(without) > 0:
		c.add("agents", Missing, fmt.Sprintf("%d of %d nodes have no ready agent: %s", len(without), len(nodes), some(without)),
			"pods with a sidecar on these nodes do not start, and wait; the DaemonSet's Events say why")
	default:
		c.add("agents", Good, fmt.Sprintf("all %d nodes have a ready one", len(nodes)), "")
	}
	if len(windows) > 0 {
		c.add("Windows nodes", Note, some(windows), "there is no agent on them; pods for Windows are not injected")
	}
	for _, release := range slices.Sorted(maps.Keys(kernels)) {
		c.kernel(fmt.Sprintf("kernel of %d nodes", kernels[release]), release)
	}
	return installed
}

// asking looks at the namespaces in which something asks for injection.
func (c *cluster) asking(ctx context.Context) {
	asks := map[string]int{}
	selector := injection.Label + " in (envoy,grpc)"
	err := each(ctx, c, "/api/v1/pods", selector, func(p *struct{ Metadata metav1.ObjectMeta }) { asks[p.Metadata.Namespace]++ })
	if err != nil {
		c.add("namespaces", Unknown, reason(err), "")
		return
	}
	// Where the pods are refused there are none.
	for _, kind := range []string{"deployments", "statefulsets", "daemonsets"} {
		err := each(ctx, c, "/apis/apps/v1/"+kind, "", func(w *struct {
			Metadata metav1.ObjectMeta
			Spec     struct {
				Template struct{ Metadata metav1.ObjectMeta }
			}
		}) {
			switch w.Spec.Template.Metadata.Labels[injection.Label] {
			case injection.Envoy, injection.GRPC:
				asks[w.Metadata.Namespace]++
			}
		})
		if err != nil {
			c.add("namespaces", Unknown, reason(err), "only pods that are there were looked at")
			break
		}
	}
	if len(asks) == 0 {
		c.add("namespaces", Good, "nothing asks for injection yet", "")
		return
	}
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		c.namespace(ctx, name)
	}
}

func (c *cluster) namespace(ctx context.Context, name string) {
	about := "namespace " + name
	var ns corev1.Namespace
	if err := c.get(ctx, "/api/v1/namespaces/"+url.PathEscape(name), &ns); err != nil {
		c.add(about, Unknown, reason(err), "")
		return
	}
	level := func(mode string) string { return ns.Labels["pod-security.kubernetes.io/"+mode] }
	strict := func(level string) bool { return level == "baseline" || level == "restricted" }
	mesh := injection.MeshOf(&ns)
	switch {
	case strict(level("enforce")):
		c.add(about, Missing, "it asks for injection and enforces Pod Security "+level("enforce"),
			"pods with the agent's sockets are refused, since they have a hostPath volume: label it pod-security.kubernetes.io/enforce: privileged")
	case mesh != "":
		c.add(about, Missing, "it asks for injection, and "+mesh+" injects its pods", "pods that ask for a sidecar of ours are refused: let one of the two have the namespace")
	case strict(level("warn")) || strict(level("audit")):
		c.add(about, Note, "it asks for injection and warns by Pod Security", "each pod with a sidecar is warned of or noted, for its hostPath volume")
	default:
		c.add(about, Good, "it asks for injection, and nothing is in the way", "")
	}
}

// needed are the rights without which an agent cannot work, and those without
// which a part is off.
var needed = []struct {
	group, resource string
	verb            string
	without         State
}{
	{"", "pods", "list", Missing}, {"", "pods", "watch", Missing},
	{"", "services", "watch", Missing}, {"", "namespaces", "watch", Missing},
	{"discovery.k8s.io", "endpointslices", "watch", Missing},
	{"gateway.networking.k8s.io", "httproutes", "watch", Note},
	{"gateway.networking.k8s.io", "grpcroutes", "watch", Note},
	{"gateway.networking.k8s.io", "referencegrants", "watch", Note},
	{"", "events", "create", Note},
}

type attributes struct {
	Group    string `json:"group,omitempty"`
	Resource string `json:"resource"`
	Verb     string `json:"verb"`
}

type review struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec       struct {
		ResourceAttributes attributes `json:"resourceAttributes"`
		User               string     `json:"user,omitempty"`
		Groups             []string   `json:"groups,omitempty"`
	} `json:"spec"`
	Status struct {
		Allowed bool   `json:"allowed"`
		Reason  string `json:"reason,omitempty"`
	} `json:"status"`
}

// rights asks what the agents' account may do; one that may not ask for others
// asks for itself, which in the agent's pod is the same.
func (c *cluster) rights(ctx context.Context) {
	who := "system:serviceaccount:" + c.agents + ":fingerpost"
	kind := "SubjectAccessReview"
	lacks := map[State][]string{}
	for _, n := range needed {
		var r review
		for {
			r = review{APIVersion: "authorization.k8s.io/v1", Kind: kind}
			r.Spec.ResourceAttributes = attributes{n.group, n.resource, n.verb}
			if kind == "SubjectAccessReview" {
				r.Spec.User, r.Spec.Groups = who, []string{"system:serviceaccounts", "system:serviceaccounts:" + c.agents, "system:authenticated"}
			}
			err := c.ask(ctx, http.MethodPost, "/apis/authorization.k8s.io/v1/"+strings.ToLower(kind)+"s", nil, r, &r)
			if code(err) == http.StatusForbidden && kind == "SubjectAccessReview" {
				kind, who = "SelfSubjectAccessReview", "whoever runs this"
				continue
			}
			if err != nil {
				c.add("rights of the agents", Unknown, reason(err), "")
				return
			}
			break
		}
		if !r.Status.Allowed {
			what := n.resource
			if n.group != "" {
				what += "." + n.group
			}
			lacks[n.without] = append(lacks[n.without], n.verb+" "+what)
		}
	}
	switch {
	case len(lacks[Missing]) > 0:
		c.add("rights of the agents", Missing, who+" may not "+strings.Join(append(lacks[Missing], lacks[Note]...), ", "), "apply the roles of daemonset")
	case len(lacks[Note]) > 0:
		c.add("rights of the agents", Note, who+" may not "+strings.Join(lacks[Note], ", "), "the parts for which they are stay off; apply the roles of daemonset")
	default:
		c.add("rights of the agents", Good, who+" may all that is needed", "")
	}
}

// reason is an error as a finding.
func reason(err error) string {
	if code(err) == http.StatusForbidden {
		return "no right: " + err.Error()
	}
	return err.Error()
}

// some names the first few of a list and counts the others.
func some(names []string) string {
	const shown = 5
	if len(names) <= shown {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:shown], ", "), len(names)-shown)
}
