package collect_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/agent/collect"
)

// Servers that say the same in another order, in other portions and twice, are
// equal to the last byte: hashes are compared between nodes.
func TestOrderOfTheAnswersMakesNoDifference(t *testing.T) {
	base := file{name: "base.proto", pkg: "base"}
	var files []file
	var names []string
	for i := range 6 {
		name := fmt.Sprintf("S%d", i)
		files = append(files, file{name: name + ".proto", pkg: "a", imports: []string{base.name}, services: [][]string{{name, "Z", "A", "M"}}})
		names = append(names, "a."+name)
	}
	r := rand.New(rand.NewPCG(1, 2))
	var first collect.Result
	for round := range 20 {
		s := &script{symbols: map[string][][]byte{}, files: map[string][][]byte{base.name: {base.raw()}}}
		for _, i := range r.Perm(len(files)) {
			s.services = append(s.services, names[i])
			answer := [][]byte{files[i].raw()}
			for _, other := range r.Perm(len(files))[:r.IntN(len(files))] {
				answer = append(answer, files[other].raw())
			}
			if r.IntN(2) == 0 {
				answer = append(answer, base.raw())
			}
			r.Shuffle(len(answer), func(i, j int) { answer[i], answer[j] = answer[j], answer[i] })
			s.symbols[names[i]] = answer
		}
		got := mustAsk(t, serve(t, func(g *grpc.Server) { registerReflection(g, v1, s.handle) }))
		got.Port = 0
		if round == 0 {
			if first = got; len(got.Files) != len(files)+1 || len(got.Services) != len(files) || got.Hash == "" {
				t.Fatalf("result %+v", got)
			}
			continue
		}
		if !reflect.DeepEqual(got, first) {
			t.Fatalf("round %d: %+v\nwant %+v", round, got, first)
		}
	}
}
