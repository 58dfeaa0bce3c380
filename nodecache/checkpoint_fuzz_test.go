package nodecache_test

import (
	"bytes"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// FuzzCheckpoint loads any bytes as a file, and as the payloads of its
// sections, which the sums keep from most mutations of a file. What was loaded
// must be good for a directory, and for the next file.
func FuzzCheckpoint(f *testing.F) {
	in := savedInfo("a", 1, "pkg.B", "pkg.A")
	in.Info.Ports[0].Files = []unique.Handle[string]{unique.Make("file")}
	in.Until = time.Unix(1<<40, 0)
	past := nodecache.SavedPast{
		Key: ownerKey("a"), Calls: map[uint16][]time.Time{1: {time.Unix(1, 0)}},
		Failure: &nodecache.SavedFailure{Count: 1, Reason: "x"}, Until: time.Now().Add(time.Hour),
	}
	var empty bytes.Buffer
	if err := nodecache.WriteCheckpoint(&empty); err != nil {
		f.Fatal(err)
	}
	whole, err := nodecache.MergeCheckpoint(empty.Bytes(), nodecache.Saved{
		Infos: []nodecache.SavedInfo{in}, Past: []nodecache.SavedPast{past}, Pods: nodecache.Unit{Line: "c", Version: 1, Data: []byte("pods")},
		Learned: []nodecache.SavedLearned{{Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "a"}, Names: map[string]time.Time{"prod/pkg.A": time.Now()}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	sections, err := nodecache.ReadCheckpoint(whole)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole, []byte(nil), []byte(nil), []byte(nil))
	for _, s := range sections {
		f.Add([]byte(nil), []byte(s.Payload), []byte(nil), []byte(nil))
	}
	f.Add(whole[:len(whole)-1], []byte{1}, []byte{0xff}, []byte("x"))
	f.Add([]byte(nil), []byte(sections[2].Payload), []byte(nil), []byte(nil))
	f.Add([]byte(nil), []byte(sections[0].Payload), []byte(sections[1].Payload), []byte("pods"))
	f.Fuzz(func(t *testing.T, file, infos, files, pods []byte) {
		var built bytes.Buffer
		must(t, nodecache.WriteCheckpoint(&built,
			nodecache.Section{Name: "info", Kind: 2, Payload: string(infos)},
			nodecache.Section{Name: "files", Kind: 2, Payload: string(files)},
			nodecache.Section{Name: "pods", Kind: 1, Payload: string(pods)},
			nodecache.Section{Name: "past", Kind: 2, Payload: string(infos)},
			nodecache.Section{Name: "learned", Kind: 2, Payload: string(infos)},
			nodecache.Section{Name: "other", Kind: 7, Payload: string(pods)}))
		for _, data := range [][]byte{file, built.Bytes()} {
			got, err := nodecache.DecodeCheckpoint(data)
			if err != nil {
				continue
			}
			d := nodecache.New(nodecache.Options{})
			d.Restore(got.Infos, time.Unix(0, 0))
			for _, in := range got.Infos {
				o := d.Owner(in.Key)
				if o == nil || o.Info == nil {
					continue
				}
				d.UpsertPod(pod("p", "192.0.2.1", owned(in.Key)))
				o = d.Owner(in.Key)
				for _, name := range o.Services() {
					if len(o.Targets(name)) != 1 {
						t.Fatalf("service %q of %+v has no target", name, o.Info)
					}
				}
				d.RemovePod("p")
			}
			data, err = nodecache.MergeCheckpoint(data, nodecache.Saved{Infos: d.Snapshot(), Past: got.Past, Learned: got.Learned, Pods: got.Pods})
			must(t, err)
			again, err := nodecache.DecodeCheckpoint(data)
			must(t, err)
			for _, in := range d.Snapshot() {
				if !slices.ContainsFunc(again.Infos, func(o nodecache.SavedInfo) bool { return o.Key == in.Key }) {
					t.Fatalf("%s is lost", in.Key)
				}
			}
		}
	})
}
