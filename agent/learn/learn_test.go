package learn

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func workload(name string) nodecache.Workload {
	return nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: name}
}

func (m *Upstreams) list(w nodecache.Workload, now time.Time) (names []string) {
	for _, n := range m.Of(w, now) {
		names = append(names, n.Cluster)
	}
	return names
}

func numbered(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("prod/a.S%03d", i))
	}
	return names
}

func TestNamesEndWhereNobodyUsesThem(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	m := New(nil, now)
	web, api := workload("web"), workload("api")
	m.Use(web, []string{"prod/a.A", "prod/a.B"}, now)
	m.Use(api, []string{"prod/a.C"}, now)
	for range 7 {
		now = now.Add(24 * time.Hour)
		m.Use(web, []string{"prod/a.A"}, now)
	}
	if got := m.list(web, now); !slices.Equal(got, []string{"prod/a.A", "prod/a.B"}) {
		t.Errorf("after a week: %v", got)
	}
	now = now.Add(24 * time.Hour)
	if got := m.list(web, now); !slices.Equal(got, []string{"prod/a.A"}) {
		t.Errorf("after more than a week: %v", got)
	}
	m.Expire(now)
	if w, n := m.Len(); w != 1 || n != 1 || m.list(api, now) != nil {
		t.Errorf("%d workloads with %d names are held, want 1 with 1", w, n)
	}
}

func TestNamesOfAWorkloadAndOfAllAreBounded(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	m := New(nil, now)
	web := workload("web")
	m.Use(web, []string{"prod/z.First"}, now)
	m.Use(web, numbered(64), now.Add(2*time.Hour))
	if got := m.list(web, now); len(got) != nodecache.LearnedMost || slices.Contains(got, "prod/z.First") {
		t.Errorf("%d names: %v", len(got), got)
	}
	for i := range 400 {
		m.Use(workload(fmt.Sprint(i)), numbered(64), now.Add(time.Duration(i+3)*time.Hour/4))
	}
	if _, n := m.Len(); n > mostNames || n <= mostNames-64 {
		t.Errorf("%d names are held, want %d", n, mostNames)
	}
	if len(m.list(web, now)) != 0 || len(m.list(workload("399"), now)) != 64 {
		t.Error("the workload that called something last is dropped, or one that did not is kept")
	}
}

func TestWhatIsUsedAllTheTimeIsNoNews(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	m := New(nil, now)
	web := workload("web")
	m.Use(web, []string{"prod/a.A"}, now)
	changes := m.Changes()
	for range 100 {
		now = now.Add(30 * time.Second)
		m.Use(web, []string{"prod/a.A"}, now)
	}
	if got := m.Changes(); got != changes {
		t.Errorf("%d changes within an hour", got-changes)
	}
	m.Use(web, []string{"prod/a.A"}, now.Add(time.Hour))
	if m.Changes() == changes {
		t.Error("a use an hour later is not kept")
	}
	back := New(m.Saved(), now)
	if got := back.list(web, now); !slices.Equal(got, []string{"prod/a.A"}) || back.Changes() != 0 {
		t.Errorf("restored: %v, %d changes", got, back.Changes())
	}
}

func TestWorkloadsAreTaughtAtOnce(t *testing.T) {
	now := time.Now()
	m := New(nil, now)
	m.most = 200
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 200 {
				w := workload(fmt.Sprint((i + j) % 11))
				m.Use(w, numbered(j%70), now.Add(time.Duration(j)*time.Hour))
				m.Of(w, now)
				m.Saved()
			}
		})
	}
	all.Wait()
	sum := 0
	for _, l := range m.Saved() {
		sum += len(l.Names)
	}
	if _, n := m.Len(); n != sum || n > 200 {
		t.Errorf("%d names are counted, %d are held", n, sum)
	}
}
