package report

import (
	"cmp"
	"slices"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Change is how what an owner serves differs from what the revision of its
// workload before it served. The zero Change is none.
type Change struct {
	// Previous is the revision before; the owner itself where it serves other
	// services than it did.
	Previous nodecache.OwnerKey
	// Added and Dropped are sorted.
	Added, Dropped []string
}

// age is that of an owner within its workload.
type age struct {
	created time.Time // of its oldest pod; zero: its pods went before this process began
	learned time.Time // when it was collected, if it was
	key     nodecache.OwnerKey
}

func (a age) compare(b age) int {
	return cmp.Or(
		a.created.Compare(b.created), // the zero time is the oldest
		a.learned.Compare(b.learned),
		cmp.Compare(a.key.UID, b.key.UID),
		cmp.Compare(a.key.Revision, b.key.Revision),
	)
}

// compare says which services an owner added and dropped. previous is what the
// revision before it served, or what it served itself at first; held what it
// has served since; now what it serves. Where now is not complete, the absence
// of a service from it says nothing. All are sorted.
func compare(previous, held, now []string, complete bool) (added, dropped []string) {
	lacks := func(in []string) func(string) bool {
		return func(name string) bool {
			_, ok := slices.BinarySearch(in, name)
			return !ok
		}
	}
	added = only(now, lacks(previous))
	if complete {
		dropped = only(union(previous, held), lacks(now))
	}
	return added, dropped
}

func only(names []string, keep func(string) bool) []string {
	var out []string
	for _, name := range names {
		if keep(name) {
			out = append(out, name)
		}
	}
	return out
}

// union returns a itself where b adds nothing: most owners never change.
func union(a, b []string) []string {
	if slices.Equal(a, b) {
		return a
	}
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// evidence returns the services of an owner, sorted, without those that every
// server has. known tells whether they are known by a collect or by
// declaration, complete whether the owner serves no others.
func evidence(o *nodecache.Owner) (services []string, known, complete bool) {
	services = slices.DeleteFunc(o.Services(), nodecache.Infrastructure)
	if !o.Knowledge.Settled() {
		return services, false, false
	}
	complete = true
	if o.Info == nil {
		return services, o.Knowledge == nodecache.Known, true
	}
	for p := range o.Info.All() {
		if p.State != nodecache.PortServes && p.State != nodecache.PortEmpty && !declares(o, p.Port) {
			complete = false
		}
	}
	return services, o.Knowledge == nodecache.Known || complete, complete
}

func declares(o *nodecache.Owner, port uint16) bool {
	return slices.ContainsFunc(o.Pods, func(m nodecache.Member) bool {
		return slices.ContainsFunc(m.Declared, func(d nodecache.Declared) bool { return d.Port == port })
	})
}
