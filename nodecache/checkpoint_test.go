package nodecache_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// state is a checkpoint in a directory of its own, and what it logs.
type state struct {
	*nodecache.Checkpoint
	t   *testing.T
	log *bytes.Buffer
}

func newState(t *testing.T) *state { return stateAt(t, filepath.Join(t.TempDir(), "state")) }

func stateAt(t *testing.T, dir string) *state {
	var log bytes.Buffer
	return &state{&nodecache.Checkpoint{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil))}, t, &log}
}

func (s *state) save(pods nodecache.Unit, infos ...nodecache.SavedInfo) {
	s.t.Helper()
	must(s.t, s.Save(nodecache.Saved{Infos: infos, Pods: pods}))
}

func (s *state) load() *nodecache.Saved {
	s.t.Helper()
	saved, err := s.Load()
	must(s.t, err)
	slices.SortFunc(saved.Infos, func(a, b nodecache.SavedInfo) int { return strings.Compare(a.Key.String(), b.Key.String()) })
	return saved
}

// keys are those of the owners that the file has.
func (s *state) keys() []string {
	s.t.Helper()
	var keys []string
	for _, i := range s.load().Infos {
		keys = append(keys, i.Key.UID)
	}
	return keys
}

func (s *state) path() string { return filepath.Join(s.Dir, "checkpoint") }

func (s *state) write(data []byte) {
	s.t.Helper()
	must(s.t, os.MkdirAll(s.Dir, 0o700))
	must(s.t, os.WriteFile(s.path(), data, 0o600))
}

func (s *state) files() []string {
	s.t.Helper()
	entries, err := os.ReadDir(s.Dir)
	must(s.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func savedInfo(uid string, collected int, services ...string) nodecache.SavedInfo {
	info := serves(services...)
	info.Collected = time.Unix(int64(1e9+collected), 0).UTC()
	return nodecache.SavedInfo{Key: ownerKey(uid), Name: "ReplicaSet/" + uid, Info: info}
}

// fill sets every field of v, so that one which is lost on the way shows.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(int64(1e9+*n), 0).UTC()))
		return
	case unique.Handle[string]:
		v.Set(reflect.ValueOf(unique.Make(fmt.Sprintf("file %03d", *n))))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), n)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, n)
		fill(value, n)
		v.SetMapIndex(key, value)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.String:
		v.SetString(fmt.Sprintf("text %03d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	default:
		panic(v.Type())
	}
}

func TestCheckpointKeepsEveryField(t *testing.T) {
	var in nodecache.SavedInfo
	n := 0
	fill(reflect.ValueOf(&in).Elem(), &n)
	in.Until = time.Now().Add(time.Hour).Truncate(time.Second)
	s := newState(t)
	pods := nodecache.Unit{Line: "a", Version: 7, Data: []byte("pods")}
	s.save(pods, in)
	out := s.load()
	if len(out.Infos) != 1 || !reflect.DeepEqual(out.Pods, pods) {
		t.Fatalf("loaded %+v", out)
	}
	if !out.Infos[0].Until.Equal(in.Until) {
		t.Errorf("until %v, want %v", out.Infos[0].Until, in.Until)
	}
	out.Infos[0].Until = in.Until
	if !reflect.DeepEqual(out.Infos[0], in) {
		t.Errorf("loaded %+v\n%+v, want %+v\n%+v", out.Infos[0], out.Infos[0].Info, in, in.Info)
	}
}

func TestCheckpointStoresOneDescriptorOnce(t *testing.T) {
	file := unique.Make(strings.Repeat("descriptor", 100_000))
	s := newState(t)
	var infos []nodecache.SavedInfo
	for i := range 100 {
		in := savedInfo(fmt.Sprintf("o%03d", i), 1, "pkg.A")
		in.Info.Ports[0].Files = []unique.Handle[string]{file}
		infos = append(infos, in)
	}
	s.save(nodecache.Unit{}, infos...)
	st, err := os.Stat(s.path())
	must(t, err)
	if st.Size() > 1_200_000 {
		t.Errorf("the file has %d bytes", st.Size())
	}
	for _, i := range s.load().Infos {
		if i.Info.Ports[0].Files[0] != file {
			t.Fatal("another descriptor")
		}
	}
	// What nobody names any more goes.
	for i := range infos {
		infos[i].Info.Ports[0].Files = nil
	}
	s.save(nodecache.Unit{}, infos...)
	if st, err = os.Stat(s.path()); err != nil || st.Size() > 200_000 {
		t.Errorf("the file has %d bytes without the descriptor (%v)", st.Size(), err)
	}
}

func TestCheckpointWithoutFileIsEmpty(t *testing.T) {
	s := newState(t)
	if got := s.load(); len(got.Infos) != 0 || got.Pods.Line != "" || s.log.Len() > 0 {
		t.Errorf("%+v, logged %s", got, s.log)
	}
}

func TestWritersInTurnLoseNothing(t *testing.T) {
	a := newState(t)
	b := stateAt(t, a.Dir)
	pods := func(v int) nodecache.Unit {
		return nodecache.Unit{Line: "cluster", Version: uint64(v), Data: fmt.Append(nil, v)}
	}
	a.save(pods(5), savedInfo("a", 1, "pkg.A"), savedInfo("both", 3, "pkg.New"))
	b.save(pods(4), savedInfo("b", 1, "pkg.B"), savedInfo("both", 2, "pkg.Old"))
	got := a.load()
	if keys := a.keys(); !slices.Equal(keys, []string{"a", "b", "both"}) {
		t.Errorf("owners %v", keys)
	}
	if s := got.Infos[2].Info.Ports[0].Services[0].Name; s != "pkg.New" {
		t.Errorf("%s won over what was collected later", s)
	}
	if got.Pods.Version != 5 {
		t.Errorf("pods of version %d won", got.Pods.Version)
	}
	b.save(nodecache.Unit{}, savedInfo("both", 3, "pkg.Newer"))
	got = b.load()
	if s := got.Infos[2].Info.Ports[0].Services[0].Name; s != "pkg.Newer" || got.Pods.Version != 5 {
		t.Errorf("%s, pods %d", s, got.Pods.Version)
	}
	// Another cluster's versions say nothing, nor does one that began anew.
	b.save(nodecache.Unit{Line: "other", Version: 1}, savedInfo("both", 3, "pkg.Newer"))
	if got := b.load().Pods; got.Line != "other" || got.Version != 1 {
		t.Errorf("pods %+v", got)
	}
	b.save(nodecache.Unit{Line: "other", Version: 0, Force: true})
	if got := b.load().Pods; got.Version != 0 {
		t.Errorf("pods %+v", got)
	}
}

func TestOverlappingWritersLoseNothing(t *testing.T) {
	const writers, rounds = 4, 25
	dir := newState(t).Dir
	var done sync.WaitGroup
	for w := range writers {
		s := stateAt(t, dir)
		done.Go(func() {
			var mine []nodecache.SavedInfo
			for r := range rounds {
				mine = append(mine, savedInfo(fmt.Sprintf("w%d-%02d", w, r), r, "pkg.A"))
				if err := s.Save(nodecache.Saved{Infos: mine, Pods: nodecache.Unit{Line: "c", Version: uint64(r*writers + w), Data: fmt.Append(nil, r*writers+w)}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done.Wait()
	s := stateAt(t, dir)
	if got := s.load(); len(got.Infos) != writers*rounds || got.Pods.Version != writers*rounds-1 || string(got.Pods.Data) != fmt.Sprint(writers*rounds-1) {
		t.Errorf("%d owners, pods %d %q", len(got.Infos), got.Pods.Version, got.Pods.Data)
	}
	if got := s.files(); !slices.Equal(got, []string{"checkpoint", "checkpoint.lock"}) {
		t.Errorf("the directory has %v", got)
	}
}

func TestInfoThatHasEndedIsForgotten(t *testing.T) {
	s := newState(t)
	ended, soon := savedInfo("ended", 1, "pkg.A"), savedInfo("soon", 1, "pkg.A")
	ended.Until, soon.Until = time.Now().Add(-time.Second), time.Now().Add(time.Hour)
	s.save(nodecache.Unit{}, ended, soon)
	s.save(nodecache.Unit{}, savedInfo("other", 1))
	if keys := s.keys(); !slices.Equal(keys, []string{"other", "soon"}) {
		t.Errorf("owners %v", keys)
	}
}

func TestUnknownSectionsAreKept(t *testing.T) {
	s := newState(t)
	foreign := []nodecache.Section{
		{Name: "earlier", Kind: 2, Payload: "\x01k" + strings.Repeat("\x00", 24) + "\x00"},
		{Name: "later", Kind: 9, Version: 3, Payload: "of a later program"},
	}
	var b bytes.Buffer
	must(t, nodecache.WriteCheckpoint(&b, foreign...))
	s.write(b.Bytes())
	for i := range 3 {
		s.save(nodecache.Unit{Line: "c", Version: uint64(i)}, savedInfo("a", i, "pkg.A"))
	}
	data, err := os.ReadFile(s.path())
	must(t, err)
	sections, err := nodecache.ReadCheckpoint(data)
	must(t, err)
	for _, f := range foreign {
		if !slices.Contains(sections, f) {
			t.Errorf("%+v is not in %+v", f, sections)
		}
	}
	if keys := s.keys(); !slices.Equal(keys, []string{"a"}) || s.log.Len() > 0 {
		t.Errorf("owners %v, logged %s", keys, s.log)
	}
}

func TestFileThatIsOfNoUseIsSetAside(t *testing.T) {
	good := newState(t)
	good.save(nodecache.Unit{Line: "c", Version: 1, Data: []byte("pods")}, savedInfo("a", 1, "pkg.A"))
	whole, err := os.ReadFile(good.path())
	must(t, err)
	flipped := bytes.Clone(whole)
	flipped[len(flipped)/2] ^= 1
	future := bytes.Clone(whole)
	binary.LittleEndian.PutUint32(future[len("fingerpost checkpoint\n"):], 2)
	var twice, badInfo bytes.Buffer
	must(t, nodecache.WriteCheckpoint(&twice, nodecache.Section{Name: "x"}, nodecache.Section{Name: "x"}))
	must(t, nodecache.WriteCheckpoint(&badInfo, nodecache.Section{Name: "info", Kind: 2, Payload: "\x05"}))
	cases := map[string][]byte{
		"empty": nil, "text": []byte("hello"), "one bit": flipped, "longer": append(bytes.Clone(whole), 0),
		"future": future, "a section twice": twice.Bytes(), "bad entries": badInfo.Bytes(),
	}
	for n := range whole {
		if n%7 == 0 {
			cases[fmt.Sprintf("cut off at %d", n)] = whole[:n]
		}
	}
	for name, data := range cases {
		for _, first := range []string{"load", "save"} {
			t.Run(name+" "+first, func(t *testing.T) {
				s := newState(t)
				s.write(data)
				aside := "checkpoint.corrupt"
				if name == "future" {
					aside = "checkpoint.version-2"
				}
				if first == "load" {
					if got := s.load(); len(got.Infos) != 0 {
						t.Errorf("loaded %+v", got)
					}
				}
				s.save(nodecache.Unit{}, savedInfo("b", 1, "pkg.B"))
				if keys := s.keys(); !slices.Equal(keys, []string{"b"}) {
					t.Errorf("owners %v", keys)
				}
				if got, err := os.ReadFile(filepath.Join(s.Dir, aside)); err != nil || !bytes.Equal(got, data) {
					t.Errorf("aside: %d bytes, %v; the directory has %v", len(got), err, s.files())
				}
				if n := strings.Count(s.log.String(), "\n"); n != 1 {
					t.Errorf("logged %q, want one line", s.log)
				}
			})
		}
	}
}

func TestFileThatIsTooLargeIsSetAside(t *testing.T) {
	s := newState(t)
	s.write(nil)
	must(t, os.Truncate(s.path(), nodecache.MaxCheckpoint+1)) // sparse
	if got := s.load(); len(got.Infos) != 0 || !strings.Contains(s.log.String(), "set aside") {
		t.Errorf("%+v, logged %s", got, s.log)
	}
	s.save(nodecache.Unit{}, savedInfo("a", 1))
	if keys := s.keys(); len(keys) != 1 {
		t.Errorf("owners %v", keys)
	}
}

func TestDirectoryThatCannotBeWrittenIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	s := stateAt(t, filepath.Join(file, "state"))
	if _, err := s.Load(); err == nil {
		t.Error("loaded from below a file")
	}
	if err := s.Save(nodecache.Saved{}); err == nil {
		t.Error("saved below a file")
	}
	if err := s.Prepare(); err == nil {
		t.Error("prepared below a file")
	}
	must(t, newState(t).Prepare())
}

func TestTenThousandOwnersAreLoaded(t *testing.T) {
	s := newState(t)
	var infos []nodecache.SavedInfo
	for i := range 10_000 {
		in := savedInfo(fmt.Sprintf("owner-%05d", i), 1, fmt.Sprintf("pkg%d.A", i), fmt.Sprintf("pkg%d.B", i))
		in.Info.Ports[0].Files = []unique.Handle[string]{unique.Make(fmt.Sprintf("%500d", i)), unique.Make("shared")}
		infos = append(infos, in)
	}
	begun := time.Now()
	s.save(nodecache.Unit{}, infos...)
	saved := time.Now()
	n := len(s.load().Infos)
	t.Logf("saved in %v, loaded in %v", saved.Sub(begun), time.Since(saved))
	if n != len(infos) {
		t.Errorf("%d owners", n)
	}
}

func TestPastOfAllWritersCounts(t *testing.T) {
	a := newState(t)
	b := stateAt(t, a.Dir)
	now := time.Now().UTC()
	at := func(minutes int) time.Time { return now.Add(time.Duration(minutes) * time.Minute) }
	past := func(uid string, until int, failure *nodecache.SavedFailure, calls ...int) nodecache.SavedPast {
		p := nodecache.SavedPast{Key: ownerKey(uid), Calls: map[uint16][]time.Time{50051: nil}, Failure: failure, Until: at(until)}
		for _, c := range calls {
			p.Calls[50051] = append(p.Calls[50051], at(c))
		}
		return p
	}
	fails := func(next int) *nodecache.SavedFailure {
		return &nodecache.SavedFailure{Since: at(-1), Count: 2, Class: "deadline", Hung: true, Reason: "x", Next: at(next)}
	}
	must(t, a.Save(nodecache.Saved{Past: []nodecache.SavedPast{past("both", 30, fails(10), -30, -20), past("a", 5, nil, -55), past("ended", -1, nil, -61)}}))
	must(t, b.Save(nodecache.Saved{Past: []nodecache.SavedPast{past("both", 50, nil, -20, -10), past("b", 1e6, fails(20))}}))
	must(t, b.Save(nodecache.Saved{Past: []nodecache.SavedPast{past("b", 40, fails(15))}}))
	got := map[string]nodecache.SavedPast{}
	for _, p := range a.load().Past {
		got[p.Key.UID] = p
	}
	want := map[string]nodecache.SavedPast{
		"a": past("a", 5, nil, -55), "b": past("b", 240, fails(20)), "both": past("both", 50, fails(10), -30, -20, -10),
	}
	if len(got) != len(want) {
		t.Errorf("the past of %d owners, want %d", len(got), len(want))
	}
	for uid, w := range want {
		g := got[uid]
		if d := g.Until.Sub(w.Until); d < 0 || d > 5*time.Second {
			t.Errorf("%s ends %s later than it should", uid, d)
		}
		if g.Until = w.Until; !reflect.DeepEqual(g, w) {
			t.Errorf("%s: %+v %+v, want %+v %+v", uid, g, g.Failure, w, w.Failure)
		}
	}
}

func TestWhatWritersLearnedIsMergedByName(t *testing.T) {
	a := newState(t)
	b := stateAt(t, a.Dir)
	now := time.Now().UTC().Truncate(time.Second)
	days := func(n int) time.Time { return now.Add(-time.Duration(n) * 24 * time.Hour) }
	web := nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "web"}
	job := nodecache.Workload{Namespace: "prod", Kind: "Job", Name: "nightly"}
	full := nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "full"}
	save := func(s *state, ls ...nodecache.SavedLearned) {
		t.Helper()
		must(t, s.Save(nodecache.Saved{Learned: ls}))
	}
	many := func(pre string, n, age int) nodecache.SavedLearned {
		l := nodecache.SavedLearned{Workload: full, Names: map[string]time.Time{}}
		for i := range n {
			l.Names[fmt.Sprintf("prod/%s.S%d", pre, i)] = days(age)
		}
		return l
	}
	save(a, nodecache.SavedLearned{Workload: web, Names: map[string]time.Time{"prod/a.A": days(3), "prod/a.B": days(1), "prod/a.Old": days(8)}}, many("old", 60, 2))
	save(b, nodecache.SavedLearned{Workload: web, Names: map[string]time.Time{"prod/a.A": days(2), "at/c/a.C": now.Add(24 * time.Hour)}},
		nodecache.SavedLearned{Workload: job, Names: map[string]time.Time{"prod/a.A": days(9)}}, many("new", 60, 1))
	save(a, nodecache.SavedLearned{Workload: web, Names: map[string]time.Time{"prod/a.B": days(5)}})
	got := map[nodecache.Workload]map[string]time.Time{}
	for _, l := range a.load().Learned {
		got[l.Workload] = l.Names
	}
	if ahead := got[web]["at/c/a.C"]; ahead.Before(now) || ahead.After(time.Now()) {
		t.Errorf("a use that a clock ahead saw is of %s", ahead)
	}
	delete(got[web], "at/c/a.C")
	if want := map[string]time.Time{"prod/a.A": days(2), "prod/a.B": days(1)}; !reflect.DeepEqual(got[web], want) {
		t.Errorf("got %v, want %v", got[web], want)
	}
	if len(got) != 2 {
		t.Errorf("%d workloads are left, want 2", len(got))
	}
	fresh := 0
	for name := range got[full] {
		if strings.HasPrefix(name, "prod/new.") {
			fresh++
		}
	}
	if len(got[full]) != nodecache.LearnedMost || fresh != 60 {
		t.Errorf("%d names are left, %d of the later ones", len(got[full]), fresh)
	}
}
