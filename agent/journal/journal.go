// Package journal keeps the agent's last decisions, with their times, for
// people who ask why something is as it is. It is memory of a fixed size: what
// is new takes the place of the oldest.
package journal

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// DefaultSize is how many decisions are kept where nothing else is asked.
	DefaultSize = 2048
	// maxText bounds the bytes of a text that are kept.
	maxText = 256
	// Pods that come and go within coalesce of one another, of one owner and
	// with few decisions between, are one entry.
	coalesce = 10 * time.Second
	between  = 16
)

// Kind says what was decided.
type Kind string

// The kinds.
const (
	CollectBegun   Kind = "collect-begun"
	CollectEnded   Kind = "collect-ended" // known, none, failed, stale or otherwise, see the text
	ServiceAdded   Kind = "service-added"
	ServiceRemoved Kind = "service-removed"
	Provider       Kind = "provider-changed"
	Pods           Kind = "pods" // joined or left what is served
	Nack           Kind = "nack"
	Quarantine     Kind = "quarantine" // a resource is withheld from a client
)

// Entry is one decision. Fields that do not apply are empty.
type Entry struct {
	At        time.Time
	Kind      Kind
	Namespace string
	Service   string // name of a gRPC service
	Owner     nodecache.OwnerKey
	OwnerName string // display name, as ReplicaSet/a-5d9
	Workload  nodecache.Workload
	Client    string // node id
	Resource  string // type and name, as "cds prod/pkg.S"
	Text      string // one line, cut after 256 bytes
	// Joined and Left count pods, Pod is the one that did last.
	Joined, Left int
	Pod          string
}

// Says is the entry as one line, without its time.
func (e *Entry) Says() string {
	switch e.Kind {
	case Pods:
		var parts []string
		if e.Joined > 0 {
			parts = append(parts, fmt.Sprintf("%d joined", e.Joined))
		}
		if e.Left > 0 {
			parts = append(parts, fmt.Sprintf("%d left", e.Left))
		}
		return fmt.Sprintf("pods of %s: %s, %s the last", e.OwnerName, strings.Join(parts, " and "), e.Pod)
	case Nack, Quarantine:
		return fmt.Sprintf("%s: %s %s: %s", e.Kind, e.Client, e.Resource, e.Text)
	case CollectBegun, CollectEnded:
		name := e.OwnerName
		if name == "" {
			name = e.Owner.String()
		}
		return strings.TrimSuffix(fmt.Sprintf("%s: %s: %s", e.Kind, name, e.Text), ": ")
	}
	return fmt.Sprintf("%s: %s/%s: %s", e.Kind, e.Namespace, e.Service, e.Text)
}

// Journal is what was decided last. Its methods are safe for concurrent use
// and never wait but for one another.
type Journal struct {
	// mu guards what follows. It is a leaf: those who add hold locks of theirs.
	mu    sync.Mutex
	ring  []Entry
	added uint64 // entries ever added; the next stands at added modulo len(ring)
}

// New returns a journal of so many decisions; 0 is [DefaultSize]. All memory but
// that of the texts is taken at once.
func New(size int) *Journal {
	if size <= 0 {
		size = DefaultSize
	}
	return &Journal{ring: make([]Entry, size)}
}

// Add notes a decision as one of now.
func (j *Journal) Add(e Entry) {
	e.At = time.Now()
	if len(e.Text) > maxText {
		e.Text = strings.ToValidUTF8(e.Text[:maxText], "") + "…"
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if e.Kind == Pods && j.joins(&e) {
		return
	}
	j.ring[j.added%uint64(len(j.ring))] = e
	j.added++
}

// joins needs mu. It adds what pods did to a late entry of their owner.
func (j *Journal) joins(e *Entry) bool {
	for n := range min(between, j.added, uint64(len(j.ring))) {
		old := &j.ring[(j.added-1-n)%uint64(len(j.ring))]
		if old.Kind != Pods || old.Owner != e.Owner {
			continue
		}
		if e.At.Sub(old.At) > coalesce {
			return false
		}
		old.Joined += e.Joined
		old.Left += e.Left
		old.Pod, old.At = e.Pod, e.At
		return true
	}
	return false
}

// Last returns the last decisions that the function keeps, at most so many,
// the oldest first. A nil function keeps all. It must not call the journal.
func (j *Journal) Last(most int, keep func(*Entry) bool) []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	var found []Entry
	for n := range min(j.added, uint64(len(j.ring))) {
		e := &j.ring[(j.added-1-n)%uint64(len(j.ring))]
		if len(found) == most {
			break
		}
		if keep == nil || keep(e) {
			found = append(found, *e)
		}
	}
	slices.Reverse(found)
	return found
}
