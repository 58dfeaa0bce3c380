package ads_test

import (
	"fmt"
	"slices"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// The xDS protocol document tells in examples what a series of requests
// subscribes to. Here each is judged by what its client hears of when
// everything changes: A and B, which were there, and N, which is new.
func TestSubscriptionAfterTheExamplesOfTheProtocol(t *testing.T) {
	none := []string{}
	type request struct{ names, sub, unsub []string }
	for name, row := range map[string]struct {
		sotw, delta []request
		want        []string
	}{
		"sotw: nothing, wildcard and name, name":         {sotw: []request{{}, {names: []string{"*", "A"}}, {names: []string{"A"}}}, want: []string{"A"}},
		"sotw: name, wildcard and name, name":            {sotw: []request{{names: []string{"A"}}, {names: []string{"*", "A"}}, {names: []string{"A"}}}, want: []string{"A"}},
		"sotw: nothing, name":                            {sotw: []request{{}, {names: []string{"A"}}}, want: []string{"A"}},
		"sotw: name, nothing":                            {sotw: []request{{names: []string{"A"}}, {}}, want: none},
		"sotw: wildcard, nothing":                        {sotw: []request{{names: []string{"*"}}, {}}, want: none},
		"sotw: nothing, wildcard and name, wildcard":     {sotw: []request{{}, {names: []string{"*", "A"}}, {names: []string{"*"}}}, want: []string{"A", "B", "N"}},
		"sotw: two names, one":                           {sotw: []request{{names: []string{"A", "B"}}, {names: []string{"B"}}}, want: []string{"B"}},
		"delta: nothing, and a name, without wildcard":   {delta: []request{{}, {sub: []string{"A"}}, {unsub: []string{"*"}}}, want: []string{"A"}},
		"delta: name, and wildcard, without wildcard":    {delta: []request{{sub: []string{"A"}}, {sub: []string{"*"}}, {unsub: []string{"*"}}}, want: []string{"A"}},
		"delta: nothing, and a name, without the name":   {delta: []request{{}, {sub: []string{"A"}}, {unsub: []string{"A"}}}, want: []string{"A", "B", "N"}},
		"delta: name, without it":                        {delta: []request{{sub: []string{"A"}}, {unsub: []string{"A"}}, {}}, want: none},
		"delta: nothing, without wildcard":               {delta: []request{{}, {unsub: []string{"*"}}}, want: none},
		"delta: wildcard in words, and the name as well": {delta: []request{{sub: []string{"*"}}, {sub: []string{"A"}}}, want: []string{"A", "B", "N"}},
	} {
		for _, typ := range []xds.Type{cds, lds} {
			t.Run(typ.String()+"/"+name, func(t *testing.T) {
				w := openWorld(t, of(typ, "A", 1), of(typ, "B", 1))
				isDelta := row.delta != nil
				s := w.connect(client.Options{Delta: isDelta, Reply: func(r client.Response) client.Reply {
					return client.Reply{Silent: !isDelta && r.Type == typ}
				}})
				var last client.Response
				say := func(names []string) {
					if err := s.SendSotW(typ, &discovery.DiscoveryRequest{ResourceNames: names, VersionInfo: last.Version, ResponseNonce: last.Nonce}); err != nil {
						t.Fatal(err)
					}
				}
				// settle takes the answers of a type up to a fence behind them.
				settle := func(names []string) (heard []string) {
					s.fences++
					fence := fmt.Sprintf("fence-%d", s.fences)
					w.set(route(fence, 1))
					s.sub(rds, fence)
					for {
						r := s.next()
						if r.Type == rds {
							if slices.Contains(r.Names(), fence) {
								return heard
							}
							continue
						}
						heard = append(heard, r.Names()...)
						if last = r; !isDelta {
							say(names)
						}
					}
				}
				var names []string
				for _, r := range row.sotw {
					names = r.names
					say(names)
					settle(names)
				}
				for _, r := range row.delta {
					if err := s.Send(typ, &discovery.DeltaDiscoveryRequest{ResourceNamesSubscribe: r.sub, ResourceNamesUnsubscribe: r.unsub}); err != nil {
						t.Fatal(err)
					}
					settle(nil)
				}
				w.set(of(typ, "A", 2), of(typ, "B", 2), of(typ, "N", 1))
				got := settle(names)
				slices.Sort(got)
				if !slices.Equal(got, row.want) && len(got)+len(row.want) > 0 {
					t.Fatalf("hears of %q, want %q", got, row.want)
				}
			})
		}
	}
}
