package nodecache_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func pod(uid, addr string) *nodecache.Pod {
	return &nodecache.Pod{
		UID: uid, Namespace: "prod", Name: uid, Node: "n1",
		Owner: nodecache.OwnerKey{UID: "rs", Revision: "1"}, OwnerName: "ReplicaSet/a-1",
		Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "a"},
		State:    nodecache.Serving, Addr: netip.MustParseAddr(addr),
		Hints: []nodecache.Hint{{Port: 50051, Why: "port name"}},
	}
}

// The last old pod goes while the first new one arrives: the new one must
// stay, and be told of.
func TestRemovalOfLastPodDuringUpsertKeepsNewPod(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	b := d.UpsertPod(pod("b", "192.0.2.2"))
	sub := d.Subscribe()
	defer sub.Close()
	d.RemovePod("b")
	a := d.UpsertPod(pod("a", "192.0.2.1"))
	if a.Generation == b.Generation {
		t.Error("the emptied record's generation goes on")
	}
	if err := d.Commit(b, &nodecache.Info{}); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit for the ended generation: %v, want ErrStale", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	keys, err := sub.Next(ctx)
	if err != nil || len(keys) != 1 {
		t.Fatalf("Next: %v, %v", keys, err)
	}
	if o := d.Owner(keys[0]); o == nil || len(o.Pods) != 1 || o.Pods[0].UID != "a" {
		t.Errorf("view %+v, want pod a", o)
	}
}
