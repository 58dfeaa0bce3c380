package journal_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/nodecache"
)

func texts(es []journal.Entry) string {
	var all []string
	for i := range es {
		all = append(all, es[i].Text)
	}
	return strings.Join(all, " ")
}

func TestOldestIsForgottenFirst(t *testing.T) {
	j := journal.New(3)
	if got := j.Last(10, nil); len(got) != 0 {
		t.Errorf("an empty journal says %v", got)
	}
	for i := range 5 {
		j.Add(journal.Entry{Kind: journal.ServiceAdded, Text: fmt.Sprint(i)})
	}
	if got := texts(j.Last(10, nil)); got != "2 3 4" {
		t.Errorf("kept %q, want 2 3 4", got)
	}
	if got := texts(j.Last(2, nil)); got != "3 4" {
		t.Errorf("the last two are %q, want 3 4", got)
	}
	if got := texts(j.Last(1, func(e *journal.Entry) bool { return e.Text != "4" })); got != "3" {
		t.Errorf("the last but 4 is %q", got)
	}
}

func TestPodsOfOneOwnerAreOneEntryWhileTheyComeTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := journal.New(0)
		web, other := nodecache.OwnerKey{UID: "web"}, nodecache.OwnerKey{UID: "other"}
		pods := func(owner nodecache.OwnerKey, joined, left int, pod string) {
			j.Add(journal.Entry{Kind: journal.Pods, Owner: owner, OwnerName: "ReplicaSet/" + owner.UID, Joined: joined, Left: left, Pod: pod})
		}
		pods(web, 2, 0, "prod/a")
		pods(other, 1, 0, "prod/x")
		pods(web, 1, 1, "prod/b")
		time.Sleep(11 * time.Second)
		pods(web, 0, 1, "prod/c")
		got := j.Last(10, nil)
		want := []string{
			"pods of ReplicaSet/web: 3 joined and 1 left, prod/b the last",
			"pods of ReplicaSet/other: 1 joined, prod/x the last",
			"pods of ReplicaSet/web: 1 left, prod/c the last",
		}
		if len(got) != len(want) {
			t.Fatalf("%d entries, want %d: %v", len(got), len(want), got)
		}
		for i := range want {
			if says := got[i].Says(); says != want[i] {
				t.Errorf("entry %d says %q, want %q", i, says, want[i])
			}
		}
	})
}

func TestTextsAreBounded(t *testing.T) {
	j := journal.New(1)
	j.Add(journal.Entry{Kind: journal.Nack, Text: strings.Repeat("ü", 1000)})
	if got := j.Last(1, nil)[0].Text; len(got) > 300 || !strings.HasSuffix(got, "ü…") {
		t.Errorf("kept %d bytes ending in %q", len(got), got[len(got)-6:])
	}
}

// What is noted while a pod or a service changes must cost the change nothing.
func TestAddingAllocatesNothing(t *testing.T) {
	j := journal.New(8)
	e := journal.Entry{Kind: journal.Pods, Owner: nodecache.OwnerKey{UID: "u"}, Joined: 1, Pod: "prod/a"}
	if n := testing.AllocsPerRun(100, func() { j.Add(e); j.Add(journal.Entry{Kind: journal.ServiceAdded, Service: "pkg.S"}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestManyMayAddAndReadAtOnce(t *testing.T) {
	j := journal.New(16)
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := range 200 {
				j.Add(journal.Entry{Kind: journal.Pods, Owner: nodecache.OwnerKey{UID: fmt.Sprint(g, i%40)}, Joined: 1})
				j.Last(4, func(e *journal.Entry) bool { return e.Joined > 0 })
			}
		})
	}
	all.Wait()
	if n := len(j.Last(100, nil)); n != 16 {
		t.Errorf("%d entries, want 16", n)
	}
}
