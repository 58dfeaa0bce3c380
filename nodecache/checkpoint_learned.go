package nodecache

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// LearnedKeep is for how long it is remembered that a workload calls a name
	// which no pod of it has asked for since: a week, with a day for a job that
	// runs once a week.
	LearnedKeep = 8 * 24 * time.Hour
	// LearnedMost bounds the names of one workload: each is a cluster in the
	// memory of each of its sidecars. Those asked for last stay.
	LearnedMost = 64
)

// SavedLearned is what pods of a workload have called by themselves.
type SavedLearned struct {
	Workload Workload
	// Names holds the names of clusters, and when each was last in use; in the
	// file to the second.
	Names map[string]time.Time
}

// trim drops what has ended by now, and what is beyond [LearnedMost]. A clock
// may have gone ahead: nothing was in use later than now.
func (l SavedLearned) trim(now time.Time) SavedLearned {
	names := make(map[string]time.Time, len(l.Names))
	for name, at := range l.Names {
		if at.After(now) {
			at = now
		}
		if now.Sub(at) < LearnedKeep && len(name) <= maxName {
			names[name] = at
		}
	}
	if len(names) > LearnedMost {
		for _, name := range LatestFirst(names)[LearnedMost:] {
			delete(names, name)
		}
	}
	return SavedLearned{Workload: l.Workload, Names: names}
}

// LatestFirst returns the names in the order of their times, and of equal ones by
// name.
func LatestFirst(names map[string]time.Time) []string {
	return slices.SortedFunc(maps.Keys(names), func(a, b string) int {
		if c := names[b].Compare(names[a]); c != 0 {
			return c
		}
		return strings.Compare(a, b)
	})
}

// learnedKey names a workload in the file.
func (w Workload) learnedKey() string { return w.Namespace + "/" + w.Kind + "/" + w.Name }

func parseLearnedKey(key string) (Workload, bool) {
	p := strings.SplitN(key, "/", 3)
	if len(p) != 3 || p[0] == "" || p[2] == "" {
		return Workload{}, false
	}
	return Workload{Namespace: p[0], Kind: p[1], Name: p[2]}, true
}

// parseLearned reads the section. An entry that another version wrote in other
// words is dropped.
func parseLearned(sections []section) ([]SavedLearned, error) {
	entries, err := parseEntries(find(sections, sectionLearned).payload)
	if err != nil {
		return nil, fmt.Errorf("section %s %w", sectionLearned, err)
	}
	var all []SavedLearned
	for _, e := range entries {
		w, ok := parseLearnedKey(e.key)
		var seconds map[string]int64
		if !ok || json.Unmarshal(e.value, &seconds) != nil {
			continue
		}
		l := SavedLearned{Workload: w, Names: make(map[string]time.Time, len(seconds))}
		for name, s := range seconds {
			l.Names[name] = time.Unix(s, 0).UTC()
		}
		all = append(all, l)
	}
	return all, nil
}

// learned merges the section learned: of a name in both the later use counts.
// Where there is no room for all, workloads stay that called something last.
func (m *merge) learned(old []section, mine []SavedLearned, now time.Time) error {
	held, err := parseLearned(old)
	if err != nil {
		return err
	}
	all := make(map[Workload]SavedLearned, len(held)+len(mine))
	for _, l := range slices.Concat(held, mine) {
		names := map[string]time.Time{}
		for _, of := range []map[string]time.Time{all[l.Workload].Names, l.Names} {
			for name, at := range of {
				if at.After(names[name]) {
					names[name] = at
				}
			}
		}
		all[l.Workload] = SavedLearned{Workload: l.Workload, Names: names}
	}
	var entries []entry
	for w, l := range all {
		l = l.trim(now)
		e := entry{key: w.learnedKey(), seen: now.Unix()}
		seconds := make(map[string]int64, len(l.Names))
		for name, at := range l.Names {
			seconds[name] = at.Unix()
			e.stamp = max(e.stamp, at.UnixNano())
		}
		e.until = time.Unix(0, e.stamp).Add(LearnedKeep).Unix()
		if len(seconds) == 0 || len(e.key) > maxName {
			continue
		}
		if e.value, err = json.Marshal(seconds); err != nil {
			return err
		}
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b entry) int {
		if a.stamp != b.stamp {
			return int(min(max(b.stamp-a.stamp, -1), 1))
		}
		return strings.Compare(a.key, b.key)
	})
	var pieces [][]byte
	size := 0
	for i := range entries {
		e := &entries[i]
		if size += len(e.key) + len(e.value) + 64; size > maxFile/16 {
			break
		}
		b := e.pieces()
		pieces = append(pieces, b[0], b[1])
	}
	m.add(section{name: sectionLearned, kind: kindKeyed}, pieces...)
	return nil
}
