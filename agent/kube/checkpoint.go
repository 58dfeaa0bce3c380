package kube

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// podsFormat begins the pods section of a checkpoint. There follow the keys of
// templates, the places, and the pods, which name these by their numbers. Only
// the version of the program that wrote a section reads it (see Cluster.line),
// so that no form has to last.
const podsFormat = "pods 2\n"

// encodePods writes records as they say of themselves: what their namespace and
// Services add is not in it.
func encodePods(records []*Record) []byte {
	var keys, places, pods []byte
	owners, of := byOwner(records)
	for _, t := range owners {
		keys = appendText(keys, t.key)
	}
	ats := map[unique.Handle[place]]uint64{}
	for n, r := range inOrder(owners, of) {
		at, known := ats[r.at]
		if !known {
			at = uint64(len(ats))
			ats[r.at], places = at, appendText(appendText(appendText(places, r.Node), r.Zone), r.at.Value().peer)
		}
		pods = binary.AppendUvarint(binary.AppendUvarint(pods, n), at)
		pods = appendText(appendText(pods, r.UID), r.Name)
		pods = binary.AppendVarint(pods, r.Created.Unix())
		state, reason := r.State, r.Reason
		if r.Unready { // the Services' word
			state, reason = nodecache.Absent, ReasonNotReady
		}
		pods = appendText(append(pods, byte(state)), reason)
		pods = appendBool(pods, r.HostNetwork)
		pods = appendText(pods, string(r.Addr.AsSlice()))
		pods = binary.AppendUvarint(pods, uint64(len(r.More)))
		for _, addr := range r.More {
			pods = appendText(pods, string(addr.AsSlice()))
		}
	}
	out := make([]byte, 0, len(podsFormat)+3*binary.MaxVarintLen64+len(keys)+len(places)+len(pods))
	out = binary.AppendUvarint(append(out, podsFormat...), uint64(len(owners)))
	out = binary.AppendUvarint(append(out, keys...), uint64(len(ats)))
	out = binary.AppendUvarint(append(out, places...), uint64(len(records)))
	return append(out, pods...)
}

// byOwner returns whose the records are, and those of each. Where the pods of an
// owner stand together they are put into the directory in half the time.
func byOwner(records []*Record) (owners []*template, of map[*template][]*Record) {
	of = map[*template][]*Record{}
	for _, r := range records {
		if of[r.of] == nil {
			owners = append(owners, r.of)
		}
		of[r.of] = append(of[r.of], r)
	}
	return owners, of
}

// inOrder yields the records of each owner with the owner's number.
func inOrder(owners []*template, of map[*template][]*Record) iter.Seq2[uint64, *Record] {
	return func(yield func(uint64, *Record) bool) {
		for n, t := range owners {
			for _, r := range of[t] {
				if !yield(uint64(n), r) {
					return
				}
			}
		}
	}
}

// errSection indicates that a section is not one that encodePods wrote.
var errSection = errors.New("not a list of pods")

func decodePods(data []byte) ([]*Record, error) {
	rest, ok := strings.CutPrefix(text(data), podsFormat)
	if !ok {
		return nil, errSection
	}
	r := reader{rest: rest}
	ofs := make([]*template, r.count())
	for i := range ofs {
		if ofs[i] = templates.get([]byte(r.text())); ofs[i] == nil {
			return nil, fmt.Errorf("%w: owner %d", errSection, i)
		}
	}
	ats := make([]unique.Handle[place], r.count())
	for i := range ats {
		ats[i] = unique.Make(place{r.text(), r.text(), r.text()})
	}
	records := make([]*Record, r.count())
	reasons := map[string]string{} // each once
	for i := range records {
		of, at := r.uvarint(), r.uvarint()
		uid, name := r.text(), r.text()
		if of >= uint64(len(ofs)) || at >= uint64(len(ats)) || uid == "" || name == "" || ofs[of].Namespace == "" {
			return nil, fmt.Errorf("%w: pod %d is of no owner", errSection, i)
		}
		p := newRecord(ofs[of], ats[at], uid, name)
		p.Created = time.Unix(r.varint(), 0).UTC()
		p.State = nodecache.PodState(r.byte())
		reason := r.text()
		if _, known := reasons[reason]; !known {
			reason = strings.Clone(reason)
			reasons[reason] = reason
		}
		p.Reason = reasons[reason]
		p.HostNetwork = r.bool()
		p.Addr = r.addr()
		if n := r.count(); n > 0 {
			p.More = make([]netip.Addr, n)
			for j := range p.More {
				p.More[j] = r.addr()
			}
		}
		if p.State > nodecache.Draining || p.State != nodecache.Absent && !p.Addr.IsValid() {
			return nil, fmt.Errorf("%w: pod %d is in no state", errSection, i)
		}
		records[i] = p
	}
	if r.failed || r.rest != "" {
		return nil, errSection
	}
	return records, nil
}

// errNotSaved indicates that there is no state to save.
var errNotSaved = errors.New("the pods have no version yet")

// Checkpoint returns the pods, and the version from which on a watch tells what
// they lack. It waits until everything that was heard of before the call is
// applied. It returns an error where nothing was listed yet, where the API
// server's versions are no numbers, and that of ctx.
func (c *Cluster) Checkpoint(ctx context.Context) (nodecache.Unit, error) {
	c.mu.Lock()
	version, id, stored := c.version, c.clusterID, c.stored.Version
	c.mu.Unlock()
	if version == 0 || id == "" {
		return nodecache.Unit{}, errNotSaved
	}
	applied := make(chan struct{})
	c.queue.whenApplied(func() { close(applied) })
	select {
	case <-applied:
	case <-ctx.Done():
		return nodecache.Unit{}, ctx.Err()
	}
	// An API server that was put back to an earlier state counts anew.
	return nodecache.Unit{Line: c.line(id), Version: version, Data: encodePods(c.store.records()), Force: version < stored}, nil
}

// line names what the versions belong to: a cluster, and a program that reads
// in a pod what this one does.
func (c *Cluster) line(clusterID string) string { return c.reader() + clusterID }

func (c *Cluster) reader() string { return "read by " + c.program + " in cluster " }

// Version is that of the last event of pods that was heard of; 0 before the
// first list.
func (c *Cluster) Version() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.version
}

// heard takes note of the version to which the watch of pods has come. Every
// event up to it is in the queue.
func (c *Cluster) heard(version string) {
	v, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		return
	}
	c.mu.Lock()
	c.version = v
	caughtUp := c.resumed && v >= c.target
	c.mu.Unlock()
	if caughtUp {
		c.reached(true)
	}
}

// reached makes the source synced, and current if it is, once everything that
// was heard of is applied.
func (c *Cluster) reached(current bool) {
	c.mu.Lock()
	synced, current := !c.syncReached, current && !c.currentReached
	c.syncReached, c.currentReached = true, c.currentReached || current
	c.mu.Unlock()
	if synced {
		c.queue.whenApplied(func() { close(c.podsSynced) })
	}
	if current {
		c.queue.whenApplied(func() { close(c.podsCurrent) })
	}
}
