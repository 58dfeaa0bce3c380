package peer

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// quest is an owner of which nothing is known, and that another agent is to
// collect. Mostly its record comes by itself before the quest is due.
type quest struct {
	due time.Time
	// skip is how many of those in charge said that they are not.
	skip   int
	asking bool // a Fetch is under way
	wanted bool // a caller of this node waits
	// tried is set when nobody is left to ask for now.
	tried bool

	hosts []string  // as they were seen last
	begun time.Time // the owner was seen first
	moved time.Time // hosts changed
	told  bool      // the collector, that hosts are quiet
}

// quiet tells whether the owner may be collected: pods of one become Ready one
// after the other, and each can put another agent in charge.
func (q *quest) quiet(now time.Time) bool {
	return q.wanted || now.Sub(q.moved) >= hostQuiet || now.Sub(q.begun) >= hostMost
}

// settleHosts lets the collector look at the owners with pods here whose hosts
// have become quiet.
func (x *Exchange) settleHosts(now time.Time) {
	var quiet []nodecache.OwnerKey
	x.mu.Lock()
	for key := range x.local {
		if q := x.quests[key]; q != nil && !q.told && q.quiet(now) {
			q.told = true
			quiet = append(quiet, key)
		}
	}
	x.mu.Unlock()
	x.collector.Consider(quiet...)
}

// seek needs mu. It begins a quest where one is needed, and ends one that is not.
func (x *Exchange) seek(key nodecache.OwnerKey, l nodecache.Learned, hosts []string) {
	if l.Knowledge != nodecache.Unknown {
		x.settle(key)
		return
	}
	now, here := time.Now(), slices.Contains(hosts, x.node)
	q := x.quests[key]
	if q != nil && slices.Equal(q.hosts, hosts) {
		return
	}
	if here {
		time.AfterFunc(hostQuiet, x.rouse)
	}
	if q != nil {
		q.hosts, q.moved, q.told = hosts, now, false
		return
	}
	wait := farGrace
	if here {
		ranked := slices.Clone(hosts)
		rank(key, ranked)
		wait = hostGrace + time.Duration(slices.Index(ranked, x.node))*hostStep
	} else if x.roster != nil {
		wait += rand.N(time.Duration(1+len(x.roster.ring)) * farSpread)
	}
	x.quests[key] = &quest{due: now.Add(wait), tried: first(key, hosts, x.live) == "", hosts: hosts, begun: now, moved: now}
}

// settle needs mu. It ends the quest for an owner.
func (x *Exchange) settle(key nodecache.OwnerKey) {
	if x.quests[key] != nil {
		delete(x.quests, key)
		if len(x.quests) == 0 {
			x.quests = map[nodecache.OwnerKey]*quest{} // a map keeps the room that it once needed
		}
		x.told()
	}
}

// Want lets the owner be known soon: a caller waits for it. It asks the agent
// in charge, where that is not this one.
func (x *Exchange) Want(key nodecache.OwnerKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.quests[key] == nil {
		x.lookAt(key) // its change may not have been heard of yet
	}
	q := x.quests[key]
	if q == nil || q.wanted {
		return
	}
	q.wanted = true
	if now := time.Now(); now.Before(q.due) {
		q.due = now
	}
	x.rouse()
}

// Wait returns when something is known of the owner, or nobody is left to ask
// for now; at once if this agent is in charge. Its error is that of ctx.
func (x *Exchange) Wait(ctx context.Context, key nodecache.OwnerKey) error {
	for {
		x.mu.Lock()
		hosts, _ := x.dir.Hosts(key)
		k, q := x.dir.Learned(key).Knowledge, x.quests[key]
		done := len(hosts) == 0 || k != nodecache.Unknown && k != nodecache.Collecting
		if x.ready && x.roster != nil {
			done = done || first(key, hosts, x.live) == x.node || q != nil && q.tried
		}
		news := x.news
		x.mu.Unlock()
		if done {
			return ctx.Err()
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pursue asks for what is due, where the budget allows.
func (x *Exchange) pursue(now time.Time) {
	type errand struct {
		keys   []nodecache.OwnerKey
		wanted bool
	}
	var here []nodecache.OwnerKey
	var submit []func()
	errands := map[string]*errand{}
	x.mu.Lock()
	if x.roster == nil || !x.ready || !x.known() {
		x.mu.Unlock()
		return
	}
	for key, q := range x.quests {
		if q.asking || now.Before(q.due) {
			continue
		}
		hosts, _ := x.dir.Hosts(key)
		switch node := x.inCharge(key, hosts, q.skip); node {
		case x.node:
			// All before this one are gone, or it is this one's and waits.
			q.due = now.Add(askAgain)
			here = append(here, key)
		case "":
			q.due, q.skip = now.Add(farGrace+rand.N(farGrace)), 0
			if !q.tried {
				q.tried = true
				x.told()
			}
			if q.wanted && x.remote {
				here = append(here, key)
			}
		default:
			e := errands[node]
			if e == nil {
				e = &errand{}
				errands[node] = e
			}
			e.keys = append(e.keys, key)
			e.wanted = e.wanted || q.wanted
		}
	}
	for node, e := range errands {
		keys, budget, priority := e.keys, x.overdue, schedule.Normal
		if e.wanted {
			budget, priority = x.wanted, schedule.Wanted
			// Those that somebody waits for, if there are too many.
			slices.SortStableFunc(keys, func(a, b nodecache.OwnerKey) int {
				switch wa, wb := x.quests[a].wanted, x.quests[b].wanted; {
				case wa && !wb:
					return -1
				case wb && !wa:
					return 1
				}
				return 0
			})
		}
		for batch := range slices.Chunk(keys, maxFetch) {
			if !budget.AllowN(now, 1) {
				for _, key := range batch {
					q := x.quests[key]
					q.due = now.Add(askAgain + rand.N(askAgain))
					if q.wanted {
						q.due = now.Add(time.Second)
					}
				}
				continue
			}
			to := x.roster.byNode[node].Member
			for _, key := range batch {
				x.quests[key].asking = true
			}
			submit = append(submit, func() {
				x.sched.Submit(schedule.PeerFetch, priority, "", func(ctx context.Context) { x.fetch(ctx, to, batch) })
			})
		}
	}
	x.mu.Unlock()
	for _, s := range submit {
		s()
	}
	x.collector.Consider(here...)
}

// inCharge needs mu. It is the agent to ask, after so many have said that it is
// not they; "" if there is none.
func (x *Exchange) inCharge(key nodecache.OwnerKey, hosts []string, skip int) string {
	hosts = slices.DeleteFunc(slices.Clone(hosts), func(n string) bool { return !x.live(n) })
	if skip >= len(hosts) {
		return ""
	}
	if skip == 0 {
		return first(key, hosts, x.live)
	}
	rank(key, hosts)
	for _, n := range hosts[skip:] {
		if n != x.node { // which is not in charge while the first one lives
			return n
		}
	}
	return ""
}

// fetch asks one agent for owners.
func (x *Exchange) fetch(ctx context.Context, to Member, keys []nodecache.OwnerKey) {
	req := &peerv1.FetchRequest{}
	for _, key := range keys {
		req.Owners = append(req.Owners, ownerKey(key))
	}
	resp, err := x.call(ctx, to, req)
	verdicts := map[nodecache.OwnerKey]peerv1.Verdict{}
	if err == nil {
		var records []*peerv1.Record
		for _, r := range resp.GetResults() {
			key := keyOf(r.GetOwner())
			if !slices.Contains(keys, key) || (r.GetVerdict() == peerv1.Verdict_VERDICT_RECORD) != (r.GetRecord() != nil) {
				err = junk("an answer to another question")
				x.metrics.rejected.WithLabelValues(string(unasked)).Inc()
				break
			}
			verdicts[key] = r.GetVerdict()
			if r.GetRecord() != nil {
				records = append(records, r.GetRecord())
			}
		}
		if err == nil {
			err = x.take(to.Node, records)
		}
		if err == nil {
			err = x.fetchFiles(ctx, to, keys)
		}
	}
	busy := status.Code(err) == codes.ResourceExhausted && !errors.Is(err, errTooMuch)
	switch {
	case err == nil:
		x.worked(to.Node)
	case ctx.Err() != nil, busy: // it is alive
	default:
		x.failed(to.Node, true, err)
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	for _, key := range keys {
		q := x.quests[key]
		if q == nil {
			continue
		}
		q.asking = false
		v, answered := verdicts[key]
		switch {
		case busy:
			q.due = now.Add(askAgain + rand.N(askAgain))
		case err != nil, !answered:
			q.due = now // the next one, or the rest
		case v == peerv1.Verdict_VERDICT_PENDING && q.wanted:
			q.due = now.Add(askAgain / 3)
		case v == peerv1.Verdict_VERDICT_PENDING:
			q.due = now.Add(askAgain + rand.N(askAgain))
		case v == peerv1.Verdict_VERDICT_RECORD:
			// It did not count: the watches are not at the same place, or it is
			// not the agent's to say.
			q.due, q.skip = now.Add(askAgain), q.skip+1
		default:
			q.due, q.skip = now.Add(time.Second), q.skip+1
		}
	}
	x.rouse()
}

// call makes a Fetch. Its error is errTooMuch for an answer that is too large.
func (x *Exchange) call(ctx context.Context, to Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchBound)
	defer cancel()
	resp, err := x.net.Fetch(ctx, to, req)
	x.metrics.asked("fetch", err)
	x.refused(err)
	return resp, err
}

// fetchFiles asks the agent for what records of the owners lack.
func (x *Exchange) fetchFiles(ctx context.Context, to Member, keys []nodecache.OwnerKey) error {
	for last := -1; ; {
		var lacking []fileHash
		x.mu.Lock()
		for _, key := range keys {
			if p, ok := x.partial[key]; ok {
				lacking = append(lacking, x.files.missing(p.rec.all)...)
			}
		}
		x.mu.Unlock()
		if len(lacking) == 0 || len(lacking) == last {
			return nil // or no progress
		}
		last = len(lacking)
		req := &peerv1.FetchRequest{}
		for _, h := range lacking[:min(len(lacking), maxWant)] {
			req.Files = append(req.Files, h[:])
		}
		resp, err := x.call(ctx, to, req)
		if err != nil {
			return err
		}
		x.takeFiles(resp.GetFiles())
	}
}

// ServeFetch answers a peer, which speaks for the node from. The error is a
// gRPC status.
func (x *Exchange) ServeFetch(ctx context.Context, from string, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	if len(req.GetOwners()) > maxFetch || len(req.GetFiles()) > maxWant {
		x.metrics.served("fetch", codes.InvalidArgument)
		return nil, status.Errorf(codes.InvalidArgument, "more than %d owners or %d files", maxFetch, maxWant)
	}
	x.mu.Lock()
	mine := x.contact(from).limiter
	x.mu.Unlock()
	if !mine.Allow() || !x.serving.Allow() {
		x.metrics.served("fetch", codes.ResourceExhausted)
		return nil, status.Error(codes.ResourceExhausted, "asked too often")
	}
	hold := time.NewTimer(fetchHold)
	defer hold.Stop()
	for held := true; held; {
		x.mu.Lock()
		resp, pending := x.answer(req)
		news := x.news
		x.mu.Unlock()
		if !pending {
			x.metrics.served("fetch", codes.OK)
			return resp, nil
		}
		select {
		case <-news:
		case <-hold.C:
			held = false
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	resp, _ := x.answer(req)
	x.metrics.served("fetch", codes.OK)
	return resp, nil
}

// answer needs mu. It tells whether one of the answers is that this agent is at
// it.
func (x *Exchange) answer(req *peerv1.FetchRequest) (resp *peerv1.FetchResponse, pending bool) {
	resp = &peerv1.FetchResponse{}
	size := 0
	for _, k := range req.GetOwners() {
		key := keyOf(k)
		r := &peerv1.FetchResult{Owner: k, Verdict: peerv1.Verdict_VERDICT_NOT_MINE}
		hosts, _ := x.dir.Hosts(key)
		switch held := x.records[key]; {
		case held != nil && x.valid(held, hosts):
			if size += held.size; size > maxMessage/2 {
				return resp, false
			}
			r.Verdict, r.Record = peerv1.Verdict_VERDICT_RECORD, held.raw
		case slices.Contains(hosts, x.node):
			r.Verdict, pending = peerv1.Verdict_VERDICT_PENDING, true
			// Somebody thinks that those before this agent are gone.
			if q := x.quests[key]; q != nil && !q.asking && q.due.After(time.Now()) {
				q.due = time.Now()
				x.rouse()
			}
		}
		resp.Results = append(resp.Results, r)
	}
	for _, h := range req.GetFiles() {
		if content, ok := x.file(h); ok {
			if size += len(content); size > maxMessage-chunk && len(resp.Files) > 0 {
				break
			}
			resp.Files = append(resp.Files, &peerv1.File{Content: []byte(content)})
		}
	}
	return resp, pending
}

// file needs mu.
func (x *Exchange) file(hash []byte) (string, bool) {
	if len(hash) != len(fileHash{}) {
		return "", false
	}
	f := x.files.files[fileHash(hash)]
	if f == nil {
		return "", false
	}
	return f.content.Value(), true
}
