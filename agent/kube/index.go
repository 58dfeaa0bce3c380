package kube

import "slices"

// index finds records by a field. Several records may share a value, and one
// record may have several values or none.
type index[K comparable] struct {
	// values appends the record's values to dst.
	values func(dst []K, r *Record) []K
	held   map[K][]*Record
}

func newIndex[K comparable](values func(dst []K, r *Record) []K) *index[K] {
	return &index[K]{values: values, held: map[K][]*Record{}}
}

func (x *index[K]) add(r *Record) {
	var buf [4]K
	for _, k := range x.values(buf[:0], r) {
		x.held[k] = append(x.held[k], r)
	}
}

func (x *index[K]) remove(r *Record) {
	var buf [4]K
	for _, k := range x.values(buf[:0], r) {
		rs := x.held[k]
		i := slices.Index(rs, r)
		if i < 0 {
			continue
		}
		if len(rs) == 1 {
			delete(x.held, k)
			continue
		}
		last := len(rs) - 1
		rs[i], rs[last] = rs[last], nil
		x.held[k] = rs[:last]
	}
}

// any returns a record with the value, nil if there is none.
func (x *index[K]) any(k K) *Record {
	if rs := x.held[k]; len(rs) > 0 {
		return rs[0]
	}
	return nil
}

// get returns a copy, sorted by namespace and name.
func (x *index[K]) get(k K) []*Record {
	rs := slices.Clone(x.held[k])
	slices.SortFunc(rs, compareRecord)
	return rs
}
