package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

const agentsNamespace = "fingerpost"

// peerKey is a fingerprint that i alone has.
func peerKey(i int) string { return fmt.Sprintf("%s%064x", keyPrefix, i) }

// anAgent is a pod of an agent of the node, number i of all.
func anAgent(i int, node string) *corev1.Pod {
	pod := servingPod(fmt.Sprintf("fingerpost-%d", i), fmt.Sprintf("uid-%d", i), "192.0.2.1")
	pod.Namespace, pod.Spec.NodeName, pod.Spec.HostNetwork = agentsNamespace, node, true
	pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(1e9+i), 0))
	pod.Annotations = map[string]string{PeerAnnotation: FormatPeer(9642, peerKey(i))}
	return pod
}

func unready(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.Status.Conditions[0].Status = corev1.ConditionFalse
	return pod
}

func terminating(pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(2e9, 0)}
	return pod
}

func agentStore() (*Store, *Agents) {
	s := NewStore(nodecache.New(nodecache.Options{}), nil)
	return s, s.FollowAgents(agentsNamespace)
}

// said is what the pods are, in their order.
func said(pods []AgentPod) string {
	var words []string
	for _, p := range pods {
		words = append(words, p.UID+" "+p.State.String())
	}
	return strings.Join(words, ", ")
}

func TestPeerAnnotationIsReadAsItIsWritten(t *testing.T) {
	for _, text := range []string{"9642", "9642 " + peerKey(7), "65535 " + peerKey(1)} {
		port, key, err := ParsePeer(text)
		if err != nil || FormatPeer(port, key) != text {
			t.Errorf("%q is read as %d %q %v", text, port, key, err)
		}
		if len(text) > maxPeer {
			t.Errorf("%q is longer than what is kept of it", text)
		}
	}
	for _, text := range []string{
		"", "0", "65536", "-1", " 9642", "9642 ", "port", "9642 " + peerKey(7) + " ", "9642  " + peerKey(7), "9642 sha1:00",
		"9642 " + strings.ToUpper(peerKey(0xa)), "9642 " + peerKey(7)[:40], "9642 " + peerKey(7) + "00", strings.Repeat("9", 1<<20),
	} {
		if port, key, err := ParsePeer(text); err == nil {
			t.Errorf("%.80q is read as %d %q", text, port, key)
		}
	}
}

// During a rollout a node has two agents: both answer for it, and it is reached
// where the one is that has the port.
func TestNodeWithTwoAgentsIsReachedAtTheOneThatHasThePort(t *testing.T) {
	s, agents := agentStore()
	old, next := anAgent(1, "n1"), anAgent(2, "n1")
	for _, step := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{old, "uid-1 ready"},
		{unready(next), "uid-1 ready, uid-2 starting"},
		{next, "uid-1 ready, uid-2 ready"},
		{terminating(old), "uid-2 ready, uid-1 leaving"},
		{terminating(unready(old)), "uid-2 ready"},
		{unready(next), "uid-2 starting"},
	} {
		s.Upsert(Convert(step.pod))
		if got := said(agents.Take()["n1"]); got != step.want {
			t.Errorf("%s, want %s", got, step.want)
		}
	}
	s.Remove(agentsNamespace, next.Name)
	if pods, told := agents.Take()["n1"]; !told || len(pods) != 0 || len(agents.Nodes()) != 0 {
		t.Errorf("%v %v after the last agent went", pods, told)
	}
}

func TestAgentsPodThatHasEndedIsNone(t *testing.T) {
	for name, end := range map[string]func(*corev1.Pod){
		"failed":     func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		"succeeded":  func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded },
		"no node":    func(p *corev1.Pod) { p.Spec.NodeName = "" },
		"no address": func(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil },
		"bad":        func(p *corev1.Pod) { p.Annotations[PeerAnnotation] = "9642 sha256:" },
		"namespace":  func(p *corev1.Pod) { p.Namespace = "prod" },
		"none":       func(p *corev1.Pod) { delete(p.Annotations, PeerAnnotation) },
	} {
		t.Run(name, func(t *testing.T) {
			s, agents := agentStore()
			pod := anAgent(1, "n1")
			if name != "namespace" {
				s.Upsert(Convert(pod))
				if agents.Take()["n1"] == nil {
					t.Fatal("it was none before")
				}
			}
			end(pod)
			s.Upsert(Convert(pod))
			if nodes := agents.Nodes(); len(nodes) != 0 {
				t.Errorf("%v have an agent", nodes)
			}
		})
	}
}

// A pod's status is written again and again; at thousands of agents nobody may
// be told of it.
func TestHeartbeatOfAnAgentsPodTellsNothing(t *testing.T) {
	s, agents := agentStore()
	pod := anAgent(1, "n1")
	s.Upsert(Convert(pod))
	<-agents.Changed()
	agents.Take()
	for i := range 3 {
		pod.Annotations["other"] = fmt.Sprint(i)
		pod.Status.Conditions[0].LastProbeTime = metav1.NewTime(time.Unix(int64(i), 0))
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{ImageID: fmt.Sprint("@sha256:", i)}}
		s.Upsert(Convert(pod))
		s.Upsert(Convert(servingPod("a", "ua", fmt.Sprint("192.0.2.", i))))
	}
	select {
	case <-agents.Changed():
		t.Errorf("told of %v", agents.Take())
	default:
	}
}

// Whatever happens to pods in whatever order, at the end the nodes have the
// agents that the store's pods are, and who took each change has them, too.
func TestAgentsAreThoseOfTheStoreAfterEveryHistory(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		s, agents := agentStore()
		taken := map[string][]AgentPod{}
		take := func() {
			for node, pods := range agents.Take() {
				if len(pods) == 0 {
					delete(taken, node)
				} else {
					taken[node] = pods
				}
			}
		}
		for range 60 {
			pod := anAgent(r.IntN(6), fmt.Sprint("n", r.IntN(3)))
			pod.UID += pod.UID[:r.IntN(2)] // or another of the same name
			switch r.IntN(7) {
			case 0:
				pod = unready(pod)
			case 1:
				pod = terminating(pod)
			case 2:
				pod = terminating(unready(pod))
			case 3:
				pod.Status.Phase = corev1.PodFailed
			case 4:
				delete(pod.Annotations, PeerAnnotation)
			case 5:
				pod.Annotations[PeerAnnotation] = FormatPeer(9000+uint16(r.IntN(2)), peerKey(r.IntN(2)))
			}
			switch r.IntN(5) {
			case 0:
				s.Remove(agentsNamespace, pod.Name)
			case 1:
				s.UpsertAll([]*Record{Convert(pod), Convert(servingPod("a", "ua", "192.0.2.9"))})
			default:
				s.Upsert(Convert(pod))
			}
			if r.IntN(3) == 0 {
				take()
			}
		}
		take()
		want := map[string][]AgentPod{}
		for _, r := range s.records() {
			if p, ok := agentPod(r); ok && r.Namespace == agentsNamespace {
				want[p.Node] = append(want[p.Node], p)
			}
		}
		for _, pods := range want {
			slices.SortFunc(pods, AgentPod.compare)
		}
		if !reflect.DeepEqual(taken, want) {
			t.Fatalf("seed %d: taken %v, want %v", seed, taken, want)
		}
		if nodes := slices.Sorted(maps.Keys(want)); !slices.Equal(agents.Nodes(), nodes) {
			t.Fatalf("seed %d: nodes %v, want %v", seed, agents.Nodes(), nodes)
		}
	}
}

func TestAgentAnswersAtItsPrimaryAddressAndPort(t *testing.T) {
	s, agents := agentStore()
	pod := anAgent(1, "n1")
	pod.Labels = map[string]string{zoneLabel: "z1"}
	pod.Status.PodIP, pod.Status.PodIPs = "2001:db8::1", []corev1.PodIP{{IP: "2001:db8::1"}, {IP: "192.0.2.1"}}
	s.Upsert(Convert(pod))
	want := AgentPod{
		Name: pod.Name, UID: "uid-1", Node: "n1", Zone: "z1", Created: time.Unix(1e9+1, 0).UTC(),
		At: netip.MustParseAddrPort("[2001:db8::1]:9642"), Key: peerKey(1),
	}
	if got := agents.Take()["n1"]; len(got) != 1 || got[0] != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestAgentsAreReadOffAFileAsWell(t *testing.T) {
	s, agents := agentStore()
	path := filepath.Join(t.TempDir(), "pods.yaml")
	pod := anAgent(1, "n1")
	pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	text, err := json.Marshal(pod)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	f := NewFile(path, s, nil)
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	<-f.Synced()
	if got := agents.Take()["n1"]; said(got) != "uid-1 ready" || got[0].Key != peerKey(1) {
		t.Errorf("%+v", got)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
