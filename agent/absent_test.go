package agent

import "testing"

func TestNearestNameIsTheOneThatWasMeant(t *testing.T) {
	names := []string{"shop.v1.Cart", "shop.v1.Checkout", "shop.v1.Stock", "mail.Sender"}
	for name, want := range map[string]string{
		"shop.v1.Chekout":    "shop.v1.Checkout",
		"shop.v1.cart":       "shop.v1.Cart",
		"Cart":               "shop.v1.Cart",
		"store.v7.CART":      "shop.v1.Cart",
		"shop.v1.Stack":      "shop.v1.Stock",
		"shop.v1.Cart":       "", // it is no typo of itself
		"shop.v1.Payments":   "",
		"a.B":                "",
		"mail.Senders":       "mail.Sender",
		"completely.Another": "",
	} {
		if got := nearest(name, names); got != want {
			t.Errorf("for %s: %q, want %q", name, got, want)
		}
	}
	for _, row := range []struct {
		a, b string
		d    int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}} {
		if got := distance(row.a, row.b); got != row.d {
			t.Errorf("distance of %q and %q: %d, want %d", row.a, row.b, got, row.d)
		}
	}
}
