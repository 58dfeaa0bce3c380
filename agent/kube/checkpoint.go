package kube

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"strconv"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// savedPods is the pods section of a checkpoint, in gob, so that fields of Pod
// that come later need no other form. What many pods have in common stands
// there once.
type savedPods struct {
	Origins []savedOrigin
	Places  []savedPlace
	Runs    []string
	Pods    []savedPod
}

type savedOrigin struct{ Namespace, UID, Revision, Display, Kind, Name string }

type savedPlace struct{ Node, Zone string }

type savedPod struct {
	Pod         nodecache.Pod // without what Of, At and Run say
	Notes       []string
	OptedOut    bool
	Of, At, Run int
}

// encodePods writes records as they say of themselves: what their namespace and
// Services add is not in it.
func encodePods(records []*Record) ([]byte, error) {
	s := savedPods{Pods: make([]savedPod, 0, len(records))}
	ofs, ats, runs := map[unique.Handle[origin]]int{}, map[unique.Handle[place]]int{}, map[unique.Handle[string]]int{}
	for _, r := range records {
		of, known := ofs[r.of]
		if !known {
			of, ofs[r.of] = len(s.Origins), len(s.Origins)
			o := r.of.Value()
			s.Origins = append(s.Origins, savedOrigin{o.namespace, o.uid, o.revision, o.display, o.kind, o.name})
		}
		at, known := ats[r.at]
		if !known {
			at, ats[r.at] = len(s.Places), len(s.Places)
			p := r.at.Value()
			s.Places = append(s.Places, savedPlace{p.node, p.zone})
		}
		run, known := runs[r.run]
		if !known {
			run, runs[r.run] = len(s.Runs), len(s.Runs)
			s.Runs = append(s.Runs, r.run.Value())
		}
		p := *r.Pod
		p.Namespace, p.Owner, p.OwnerName, p.Workload = "", nodecache.OwnerKey{}, "", nodecache.Workload{}
		p.Node, p.Zone, p.Images = "", "", ""
		if p.Unready { // the Services' word
			p.State, p.Reason, p.Unready = nodecache.Absent, ReasonNotReady, false
		}
		s.Pods = append(s.Pods, savedPod{Pod: p, Notes: r.Notes, OptedOut: r.optedOut, Of: of, At: at, Run: run})
	}
	return encodeSaved(&s)
}

func encodeSaved(s *savedPods) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(s)
	return b.Bytes(), err
}

func decodePods(data []byte) ([]*Record, error) {
	var s savedPods
	if err := gob.NewDecoder(bytes.NewReader(data)).Decode(&s); err != nil {
		return nil, err
	}
	records := make([]*Record, 0, len(s.Pods))
	ofs, ats := make([]unique.Handle[origin], len(s.Origins)), make([]unique.Handle[place], len(s.Places))
	for i, o := range s.Origins {
		ofs[i] = unique.Make(origin{o.Namespace, o.UID, o.Revision, o.Display, o.Kind, o.Name})
	}
	for i, p := range s.Places {
		ats[i] = unique.Make(place{p.Node, p.Zone})
	}
	for i := range s.Pods {
		saved := &s.Pods[i]
		if saved.Of < 0 || saved.Of >= len(ofs) || saved.At < 0 || saved.At >= len(ats) || saved.Run < 0 || saved.Run >= len(s.Runs) {
			return nil, fmt.Errorf("pod %d is of no owner", i)
		}
		p := saved.Pod // apart from the others, which may go before it
		if p.UID == "" || p.Name == "" || p.Unready || p.State > nodecache.Draining || p.State != nodecache.Absent && !p.Addr.IsValid() {
			return nil, fmt.Errorf("pod %d is none", i)
		}
		r := &Record{Pod: &p, Notes: saved.Notes, optedOut: saved.OptedOut, of: ofs[saved.Of], at: ats[saved.At], run: unique.Make(s.Runs[saved.Run])}
		of, at := r.of.Value(), r.at.Value()
		p.Namespace, p.OwnerName = of.namespace, of.display
		p.Owner = nodecache.OwnerKey{UID: of.uid, Revision: of.revision}
		p.Workload = nodecache.Workload{Namespace: of.namespace, Kind: of.kind, Name: of.name}
		p.Node, p.Zone, p.Images = at.node, at.zone, r.run.Value()
		p.Created, p.CollectOff, p.Export = p.Created.UTC(), saved.OptedOut, unique.Make(p.Export).Value()
		if p.Namespace == "" {
			return nil, fmt.Errorf("pod %d is in no namespace", i)
		}
		records = append(records, r)
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
	data, err := encodePods(c.store.records())
	// An API server that was put back to an earlier state counts anew.
	return nodecache.Unit{Line: c.line(id), Version: version, Data: data, Force: version < stored}, err
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
