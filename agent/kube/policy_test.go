package kube

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestPolicyAnnotations(t *testing.T) {
	for _, c := range []struct {
		annotation, value string
		want              nodecache.Policy
		ignored           string
	}{
		{RetryOnAnnotation, "unavailable, connect-failure,unavailable", nodecache.Policy{RetryOn: "connect-failure,unavailable"}, ""},
		{RetryOnAnnotation, "connect-failure,5xx", nodecache.Policy{}, `"5xx" is none of connect-failure`},
		{RetryOnAnnotation, "", nodecache.Policy{}, `"" is none of`},
		{NumRetriesAnnotation, "3", nodecache.Policy{Retries: 3}, ""},
		{NumRetriesAnnotation, "0", nodecache.Policy{NoRetries: true}, ""},
		{NumRetriesAnnotation, "11", nodecache.Policy{}, "from 0 to 10"},
		{NumRetriesAnnotation, "-1", nodecache.Policy{}, "from 0 to 10"},
		{RetryBudgetAnnotation, "50%", nodecache.Policy{RetryBudget: 50}, ""},
		{RetryBudgetAnnotation, "100", nodecache.Policy{RetryBudget: 100}, ""},
		{RetryBudgetAnnotation, "0", nodecache.Policy{}, "from 1 to 100"},
		{MaxRequestsAnnotation, " 100 ", nodecache.Policy{MaxRequests: 100}, ""},
		{MaxRequestsAnnotation, "4294967296", nodecache.Policy{}, "from 1 to 4294967295"},
		{MaxRequestsAnnotation, "0", nodecache.Policy{}, "from 1 to"},
		{ConnectTimeoutAnnotation, "2s", nodecache.Policy{ConnectTimeout: 2 * time.Second}, ""},
		{ConnectTimeoutAnnotation, "2", nodecache.Policy{}, "as 1.5s"},
		{ConnectTimeoutAnnotation, "2m", nodecache.Policy{}, "from 1ms to 1m0s"},
		{KeepaliveAnnotation, "1s", nodecache.Policy{Keepalive: time.Second}, ""},
		{KeepaliveAnnotation, "100ms", nodecache.Policy{}, "from 1s to 1h0m0s"},
		{OutlierAnnotation, "off", nodecache.Policy{NoOutliers: true}, ""},
		{OutlierAnnotation, "2", nodecache.Policy{OutlierFailures: 2}, ""},
		{OutlierAnnotation, "on", nodecache.Policy{}, `neither "off" nor`},
	} {
		pod := servingPod("a", "u-a", "192.0.2.1")
		pod.Annotations = map[string]string{c.annotation: c.value, GRPCPortAnnotation: "9090"}
		r := Convert(pod)
		var got nodecache.Policy
		if r.Policy != nil {
			got = *r.Policy
		}
		if notes := strings.Join(r.Notes(), "\n"); got != c.want || !strings.Contains(notes, c.ignored) || (c.ignored == "") != (notes == "") || len(r.Hints) == 0 {
			t.Errorf("%s: %q: %+v, notes %q; want %+v, %q", c.annotation, c.value, got, notes, c.want, c.ignored)
		}
	}
}

// One that makes no sense is ignored alone.
func TestPolicyAnnotationsCountEachAlone(t *testing.T) {
	annotations := map[string]string{NumRetriesAnnotation: "x", KeepaliveAnnotation: "y", MaxRequestsAnnotation: "7", ServicesAnnotation: "1=pkg.A", ExportAnnotation: "B"}
	pod := servingPod("a", "u-a", "192.0.2.1")
	pod.Annotations = annotations
	r := Convert(pod)
	if r.Policy.String() != "max-requests=7" || len(r.Notes()) != 3 {
		t.Errorf("policy %s, notes %q", r.Policy, r.Notes())
	}
	f := ConvertService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}})
	if f.Policy.String() != "max-requests=7" || strings.Count(f.Ignored, "is ignored") != 3 {
		t.Errorf("Service: policy %s, ignored %q", f.Policy, f.Ignored)
	}
}

// There are many pods: one that says nothing costs nothing, and those of an owner
// share what they say.
func TestPodsOfAnOwnerShareTheirPolicy(t *testing.T) {
	var rs []*Record
	for i := range 2 {
		pod := servingPod(fmt.Sprint("a-", i), fmt.Sprint("u-", i), "192.0.2.1")
		yes := true
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "a", UID: "rs", Controller: &yes}}
		pod.Annotations = map[string]string{MaxRequestsAnnotation: "7"}
		rs = append(rs, Convert(pod))
	}
	if rs[0].Policy != rs[1].Policy {
		t.Error("two pods of an owner have a policy each")
	}
	if r := Convert(servingPod("b", "u-b", "192.0.2.2")); r.Policy != nil || r.Ignored != nil {
		t.Errorf("a pod that says nothing has %+v, %q", r.Policy, r.Ignored)
	}
}
