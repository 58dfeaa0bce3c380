package nodecache

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"
)

// pastKeep bounds how far ahead the end of a past may lie: a clock may have gone
// ahead.
const pastKeep = 4 * time.Hour

// SavedPast is what agents of the node have lately asked of the pods of an
// owner: it binds the next one as well.
type SavedPast struct {
	Key OwnerKey `json:"-"`
	// Calls are the times of the connections to each port, oldest first.
	Calls map[uint16][]time.Time `json:",omitempty"`
	// Failure is why the owner must be left alone; nil if it need not.
	Failure *SavedFailure `json:",omitempty"`
	// Until is when nothing of this matters any more; in the file to the second,
	// and at most four hours ahead.
	Until time.Time `json:"-"`
}

// SavedFailure is a row of failures that could have done a server harm.
type SavedFailure struct {
	Since  time.Time // of the first
	Count  int
	Class  string // of the last
	Hung   bool   // the last was taken and not answered
	Reason string
	Next   time.Time // not before this
}

// join makes one of what two agents know.
func (p SavedPast) join(o SavedPast) SavedPast {
	calls := maps.Clone(p.Calls)
	if calls == nil {
		calls = o.Calls
	} else {
		for port, ts := range o.Calls {
			all := slices.Concat(calls[port], ts)
			slices.SortFunc(all, time.Time.Compare)
			calls[port] = slices.CompactFunc(all, time.Time.Equal)
		}
	}
	p.Calls = calls
	if p.Failure == nil || o.Failure != nil && o.Failure.Next.After(p.Failure.Next) {
		p.Failure = o.Failure
	}
	if o.Until.After(p.Until) {
		p.Until = o.Until
	}
	return p
}

// parsePast reads the section. An entry that another version wrote in other
// words is dropped.
func parsePast(sections []section) ([]SavedPast, error) {
	entries, err := parseEntries(find(sections, sectionPast).payload)
	if err != nil {
		return nil, fmt.Errorf("section %s %w", sectionPast, err)
	}
	var past []SavedPast
	for _, e := range entries {
		p := SavedPast{Until: time.Unix(e.until, 0)}
		if p.Key, err = ParseOwnerKey(e.key); err != nil || json.Unmarshal(e.value, &p) != nil {
			continue
		}
		past = append(past, p)
	}
	return past, nil
}

// past merges the section past: what the file has of an owner counts beside
// what the writer has, until its end.
func (m *merge) past(old []section, mine []SavedPast, now time.Time) error {
	held, err := parsePast(old)
	if err != nil {
		return err
	}
	all := make(map[OwnerKey]SavedPast, len(held)+len(mine))
	for _, p := range slices.Concat(held, mine) {
		if was, ok := all[p.Key]; ok {
			p = p.join(was)
		}
		all[p.Key] = p
	}
	var pieces [][]byte
	size := 0
	for key, p := range all {
		if !p.Until.After(now) {
			continue
		}
		if most := now.Add(pastKeep); p.Until.After(most) {
			p.Until = most
		}
		// The part of a second counts as well.
		e := entry{key: key.String(), seen: now.Unix(), until: p.Until.Add(time.Second - 1).Unix()}
		if e.value, err = json.Marshal(&p); err != nil {
			return err
		}
		if size += len(e.key) + len(e.value) + 64; size > maxFile/16 {
			break
		}
		b := e.pieces()
		pieces = append(pieces, b[0], b[1])
	}
	m.add(section{name: sectionPast, kind: kindKeyed}, pieces...)
	return nil
}
