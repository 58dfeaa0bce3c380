package resources

import "github.com/fingerpost/fingerpost/nodecache"

// Witness is told what was decided, for the record. It is called with the
// compiler's lock held: it must not call the compiler, nor wait.
type Witness interface {
	// ServiceAdded and ServiceRemoved tell that callers of the namespace have,
	// or have no more, a cluster for the service.
	ServiceAdded(namespace, service string, provider nodecache.Workload)
	ServiceRemoved(namespace, service string, provider nodecache.Workload)
	ProviderChanged(namespace, service string, from, to nodecache.Workload)
	// PodsMoved tells how many pods of an owner are served from now on, and how
	// many no longer; last is one of them.
	PodsMoved(o *nodecache.Owner, joined, left int, last *nodecache.Pod)
}

// provided needs mu. It notes who provides a service now.
func (c *Compiler) provided(id serviceID, s *service, by nodecache.Workload) {
	was := s.provider
	s.provider = by
	switch {
	case c.witness == nil || was == by:
	case was == nodecache.Workload{}:
		c.witness.ServiceAdded(id.namespace, id.name, by)
	default:
		c.witness.ProviderChanged(id.namespace, id.name, was, by)
	}
}

// moved needs mu. It tells the witness how the pods of an owner changed; either
// view may be nil. It allocates nothing.
func (c *Compiler) moved(was, is *nodecache.Owner) {
	if c.witness == nil {
		return
	}
	var before, after []nodecache.Member
	owner := is
	if was != nil {
		before = was.Pods
	}
	if is != nil {
		after = is.Pods
	} else {
		owner = was
	}
	joined, left := 0, 0
	var last *nodecache.Pod
	for len(before) > 0 || len(after) > 0 {
		order := 0
		switch {
		case len(before) == 0:
			order = 1
		case len(after) == 0:
			order = -1
		case before[0].UID != after[0].UID:
			order = before[0].Compare(after[0].Pod)
		}
		in, out := order >= 0 && called(after[0]), order <= 0 && called(before[0])
		switch {
		case in && !out:
			joined, last = joined+1, after[0].Pod
		case out && !in:
			left, last = left+1, before[0].Pod
		}
		if order >= 0 {
			after = after[1:]
		}
		if order <= 0 {
			before = before[1:]
		}
	}
	if last != nil {
		c.witness.PodsMoved(owner, joined, left, last)
	}
}

// called tells whether new calls go to a pod, if its program has the service.
func called(m nodecache.Member) bool { return m.State == nodecache.Serving && !m.Shadowed }
