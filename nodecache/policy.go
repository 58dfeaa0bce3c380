package nodecache

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Policy is what a workload wants of calls to it. Of what is zero nothing is
// said. It is immutable; the pods of an owner share one.
type Policy struct {
	// RetryOn holds the conditions on which a call is repeated, as Envoy names
	// them, sorted and with commas between.
	RetryOn string
	// Retries is how often at most; NoRetries means never.
	Retries   uint32
	NoRetries bool
	// RetryBudget is how many of the calls under way may be retries, in percent.
	RetryBudget uint32
	// MaxRequests is how many calls may be under way, from each client.
	MaxRequests    uint32
	ConnectTimeout time.Duration
	// Keepalive is the time between HTTP/2 pings on a connection.
	Keepalive time.Duration
	// OutlierFailures is how many connections in a row fail before an endpoint
	// gets no calls for a while; NoOutliers means that it always gets some.
	OutlierFailures uint32
	NoOutliers      bool
}

// Retry tells whether something is said of what is repeated, and how often.
func (p *Policy) Retry() bool {
	return p != nil && (p.RetryOn != "" || p.Retries > 0 || p.NoRetries)
}

// Equal tells whether two policies say the same; each may be nil.
func (p *Policy) Equal(q *Policy) bool { return p == q || p != nil && q != nil && *p == *q }

// String is what is said, with the words of the annotations.
func (p *Policy) String() string {
	if p == nil {
		return ""
	}
	var said []string
	add := func(name string, value any, there bool) {
		if there {
			said = append(said, fmt.Sprintf("%s=%v", name, value))
		}
	}
	add("retry-on", p.RetryOn, p.RetryOn != "")
	add("num-retries", p.Retries, p.Retries > 0 || p.NoRetries)
	add("retry-budget", fmt.Sprintf("%d%%", p.RetryBudget), p.RetryBudget > 0)
	add("max-requests", p.MaxRequests, p.MaxRequests > 0)
	add("connect-timeout", p.ConnectTimeout, p.ConnectTimeout > 0)
	add("keepalive-interval", p.Keepalive, p.Keepalive > 0)
	add("outlier-detection", p.OutlierFailures, p.OutlierFailures > 0)
	add("outlier-detection", "off", p.NoOutliers)
	return strings.Join(said, ", ")
}

// A policy changes clusters, which clients build anew. So it is a word of the
// workload, not of its pods: of the revision that came last, and of that the
// word of its oldest pod. It holds as long as the revision is remembered: pods
// that become Ready and are not, and a workload without pods, change nothing.

// heed needs mu. It notes a pod of the record that was added.
func (r *record) heed(p *Pod) {
	if r.voice == nil || compareAge(p, r.voice) < 0 {
		r.voice = p
	}
}

// unheed needs mu. It notes that a pod of the record was removed.
func (r *record) unheed(p *Pod) {
	if r.voice != p {
		return
	}
	r.voice = nil
	for _, q := range r.pods {
		r.heed(q)
	}
}

// compareAge orders pods of one owner, the oldest first.
func compareAge(p, q *Pod) int {
	return cmp.Or(p.Created.Compare(q.Created), cmp.Compare(p.UID, q.UID))
}

// word is what one revision says.
type word struct {
	key     OwnerKey
	created time.Time
	policy  *Policy
}

// wordOf needs mu, for reading at least. It is false of an owner of which nothing
// is known.
func (d *Directory) wordOf(key OwnerKey) (word, bool) {
	if rec := d.owners[key]; rec != nil {
		w := word{key: key, created: rec.created}
		if rec.voice != nil { // else it is about to be filled
			w.policy = rec.voice.Policy
		}
		return w, rec.voice != nil
	}
	if l := d.infos[key]; l != nil {
		return word{key: key, created: l.created, policy: l.policy}, true
	}
	return word{}, false
}

// mates needs mu, for reading at least. They are the revisions of the workload of
// the owner, with itself.
func (d *Directory) mates(w Workload, key OwnerKey) []OwnerKey {
	if keys := d.workloads[w]; len(keys) > 0 {
		return keys
	}
	return []OwnerKey{key}
}

// policy needs mu, for reading at least. It is what the workload of the owner
// says, nil for nothing.
func (d *Directory) policy(w Workload, key OwnerKey) *Policy {
	var last word
	found := false
	for _, k := range d.mates(w, key) {
		if o, ok := d.wordOf(k); ok && (!found || cmp.Or(o.created.Compare(last.created), o.key.compare(last.key)) > 0) {
			last, found = o, true
		}
	}
	return last.policy
}

// opinionated needs mu, for reading at least. It tells whether some revision of
// the workload of the owner has a policy: then who comes and goes may change it.
func (d *Directory) opinionated(w Workload, key OwnerKey) bool {
	return slices.ContainsFunc(d.mates(w, key), func(k OwnerKey) bool {
		o, _ := d.wordOf(k)
		return o.policy != nil
	})
}

// tellPolicy needs mu. Where the workload of the owner says something else than
// last time, it tells of all its revisions and of the Services in front of them.
func (d *Directory) tellPolicy(w Workload, of OwnerKey) {
	now := d.policy(w, of)
	if !w.revises() || now.Equal(d.told[w]) {
		return
	}
	if now == nil {
		delete(d.told, w)
	} else {
		d.told[w] = now
	}
	for _, key := range d.mates(w, of) {
		d.tell(key)
		var behind []*Standing
		if rec := d.owners[key]; rec != nil {
			behind = rec.behind
			for _, p := range rec.pods {
				d.changedBehind(p)
			}
		} else if l := d.infos[key]; l != nil {
			behind = l.behind
		}
		for _, st := range behind {
			d.changedFront(st.Key())
		}
	}
}

// knowledge is that of an owner without pods.
func (l *learned) knowledge() Knowledge {
	if l.last == nil {
		return Unknown
	}
	return knowledgeOf(l.last)
}

// PolicyBehind returns what the workloads behind a Service, or that stood there
// last, say of calls: the word of the first that says anything, by kind and
// name; nil where none does. It is not known where nobody is and nobody is
// remembered.
func (d *Directory) PolicyBehind(service Name) (p *Policy, known bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if !d.spoken {
		return nil, true
	}
	owners := maps.Clone(d.fronts.rememberers[service])
	if rec := d.fronts.byName[service]; rec != nil {
		for _, uid := range rec.places() {
			if pod := d.pods[uid]; pod != nil {
				if owners == nil {
					owners = map[OwnerKey]struct{}{}
				}
				owners[pod.Owner] = struct{}{}
			}
		}
	}
	var first Workload
	for key := range owners {
		w := d.workloadOf(key)
		if p != nil && w.Compare(first) >= 0 {
			continue
		}
		if said := d.policy(w, key); said != nil {
			first, p = w, said
		}
	}
	return p, len(owners) > 0
}

// places are the UIDs of what stands behind the Service.
func (r *frontRecord) places() []string {
	if r.front == nil {
		return nil
	}
	var uids []string
	if r.host != nil {
		uids = append(uids, hostUID(r.front))
	}
	for _, s := range r.slices {
		if s.standing == nil {
			continue
		}
		for _, e := range s.slice.Endpoints {
			uids = append(uids, s.places(e)...)
		}
	}
	return uids
}

// workloadOf needs mu, for reading at least.
func (d *Directory) workloadOf(key OwnerKey) Workload {
	if rec := d.owners[key]; rec != nil {
		return rec.workload
	}
	if l := d.infos[key]; l != nil {
		return l.workload
	}
	return Workload{}
}
